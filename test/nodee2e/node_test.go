package nodee2e

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// cardMiB is the memory of a 16 GB card in MiB; it has 15 whole GiB.
const cardMiB = 16276

// TestPods runs pods on a node without faults.
func TestPods(t *testing.T) {
	r := startRig(t, cardMiB, cardMiB, cardMiB, cardMiB)
	defer r.report(t)

	r.play(t, "one pod", func(s *scene) {
		s.burst(s.pod(3))
	})
	r.play(t, "pods that come one after the other", func(s *scene) {
		for range 6 {
			s.burst(s.pod(2))
			s.settle()
		}
	})
	for _, burst := range []struct {
		pods   int
		memory int64
	}{{8, 7}, {20, 3}, {40, 1}} {
		r.play(t, fmt.Sprintf("a burst of %d pods of one size", burst.pods), func(s *scene) {
			s.burst(times(burst.pods, func() *corev1.Pod { return s.pod(burst.memory) })...)
		})
	}
	r.play(t, "a burst of pods of mixed sizes", func(s *scene) {
		s.burst(times(16, func() *corev1.Pod { return s.pod(1 + s.random.Int64N(5)) })...)
	})
	r.play(t, "pods with several GPU containers", func(s *scene) {
		s.burst(times(8, func() *corev1.Pod { return s.pod(2, with("second", 2), with("third", 1)) })...)
	})
	r.play(t, "pods with init containers and sidecars", func(s *scene) {
		s.burst(
			s.pod(2, first("init", 2)), s.pod(2, first("init", 4)), s.pod(4, first("init", 1)),
			s.pod(2, beside("sidecar", 1)), s.pod(2, beside("sidecar", 2), with("second", 2)),
			s.pod(1, first("init", 1), beside("sidecar", 1), with("second", 1)),
			s.pod(1, first("one", 1), first("two", 2)), s.pod(2, with("plain", 0)),
		)
	})
	r.play(t, "pods of any shape that come and go at three quarters full", func(s *scene) {
		s.burst(times(8, func() *corev1.Pod { return s.any(3) })...)
		s.bound()
		for range 4 {
			names := s.names()
			s.random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
			s.delete(names[:3]...)
			s.burst(times(3, func() *corev1.Pod { return s.any(3) })...)
		}
	})
	r.play(t, "pods that ignore SIGTERM keep their card through their grace period", func(s *scene) {
		s.burst(times(4, func() *corev1.Pod { return s.pod(15, stubborn(10)) })...)
		s.settle()
		s.delete(s.names()...)
		s.burst(times(8, func() *corev1.Pod { return s.pod(7) })...)
	})
	r.play(t, "pods whose node was named by hand", func(s *scene) {
		s.burst(times(6, func() *corev1.Pod { return s.pod(3, onNode(s.node.name)) })...)
		s.settle()
	})
	r.play(t, "pods whose node was named by hand among others", func(s *scene) {
		s.otherDevices = true
		named := times(6, func() *corev1.Pod { return s.pod(2, onNode(s.node.name)) })
		s.burst(append(named, times(10, func() *corev1.Pod { return s.pod(2) })...)...)
	})
	r.play(t, "pods whose node was named by hand and others that fill the node to the brim", func(s *scene) {
		s.otherDevices = true
		named := times(6, func() *corev1.Pod { return s.pod(5, onNode(s.node.name)) })
		s.burst(append(named, times(6, func() *corev1.Pod { return s.pod(5) })...)...)
	})
}

package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// cardMiB is a card of 16 GB: 15 whole GiB.
const cardMiB = 16276

// What the node does while nothing goes wrong.
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

// What the node does when its parts go away and come back.
func TestFaults(t *testing.T) {
	r := startRig(t, cardMiB, cardMiB, 8138, cardMiB)
	defer r.report(t)

	r.play(t, "pods bound while the kubelet was away", func(s *scene) {
		s.burst(times(4, func() *corev1.Pod { return s.pod(2) })...)
		s.settle()
		unharmed := s.unharmed()
		must(s, s.node.kubelet.Kill())
		s.burst(times(12, func() *corev1.Pod { return s.pod(1 + s.random.Int64N(2)) })...)
		s.burst(times(4, func() *corev1.Pod { return s.pod(1, with("second", 1)) })...)
		s.bound()
		must(s, s.node.kubelet.Start(s.Context()))
		s.removeFailed(0)
		s.settle()
		unharmed()
	})
	r.play(t, "a kubelet that is started again and again", func(s *scene) {
		s.burst(times(6, func() *corev1.Pod { return s.pod(2, with("second", 1)) })...)
		s.settle()
		unharmed := s.unharmed()
		for range 3 {
			must(s, s.node.kubelet.Restart(s.Context()))
			s.awaitCards()
			s.burst(times(4, func() *corev1.Pod { return s.pod(1) })...)
			s.settle()
		}
		unharmed()
	})
	r.play(t, "a kubelet that has lost its checkpoint", func(s *scene) {
		s.burst(times(8, func() *corev1.Pod { return s.pod(2) })...)
		s.settle()
		unharmed := s.unharmed()
		must(s, s.node.kubelet.Kill())
		must(s, os.Remove(s.node.outside("lib/kubelet/device-plugins/kubelet_internal_checkpoint")))
		must(s, s.node.kubelet.Start(s.Context()))
		s.awaitCards()
		s.otherDevices = true
		s.settle()
		unharmed()
		// The kubelet takes the node for empty now.
		s.burst(times(4, func() *corev1.Pod { return s.pod(3) })...)
		s.settle()
		unharmed()
		s.remove()
	})
	r.play(t, "a device plugin killed between bursts", func(s *scene) {
		for range 3 {
			s.burst(times(4, func() *corev1.Pod { return s.pod(2, with("second", 1)) })...)
			s.settle()
			unharmed := s.unharmed()
			must(s, s.node.plugin.Restart(s.Context()))
			s.awaitCards()
			s.settle()
			unharmed()
		}
	})
	r.play(t, "a device plugin killed amid bursts", func(s *scene) {
		for range 3 {
			s.burst(times(6, func() *corev1.Pod { return s.pod(1, with("second", 1)) })...)
			// Any moment will do: there is nothing to wait for.
			time.Sleep(time.Duration(s.random.IntN(400)) * time.Millisecond)
			must(s, s.node.plugin.Restart(s.Context()))
			s.awaitCards()
			s.removeFailed(12)
		}
	})
	r.play(t, "an API server that was away", func(s *scene) {
		s.burst(times(4, func() *corev1.Pod { return s.pod(2) })...)
		s.settle()
		unharmed := s.unharmed()
		s.burst(times(8, func() *corev1.Pod { return s.pod(1, with("second", 1)) })...)
		must(s, s.bed.APIServer.Kill())
		must(s, s.bed.APIServer.Start(s.Context()))
		s.settle()
		unharmed()
	})
	r.play(t, "a card that fails", func(s *scene) {
		s.burst(times(8, func() *corev1.Pod { return s.pod(3) })...)
		s.settle()
		unharmed := s.unharmed()
		must(s, s.node.driver.Xid("0", 79))
		eventually(s, "the inventory says that card 0 is unhealthy", func(ctx context.Context) error {
			node, err := s.bed.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			inventory, err := protocol.ParseInventory(node.Annotations)
			if err == nil && inventory.Cards[0].Healthy() {
				err = errors.New("it is healthy")
			}
			return err
		})
		before := s.names()
		s.burst(times(8, func() *corev1.Pod { return s.pod(2) })...)
		s.settle()
		unharmed()
		pods, err := s.list(s.Context())
		must(s, err)
		for _, pod := range pods[len(before):] {
			if card, err := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex]); err != nil || card == 0 {
				s.Errorf("pod %s is on card %d, which has failed: %v", pod.Name, card, err)
			}
		}
	})
}

package nodee2e

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// TestFaults kills and restarts the node's programs.
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
		s.removeFailed(0, pluginAway) // The kubelet fails a pod for good if it admits it before a plugin has registered.
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
		s.withoutCheckpoint(func() {})
		s.otherDevices = true
		s.settle()
		unharmed()
		// The kubelet calls Allocate again for the containers that it restarts. The others keep running without an entry in the
		// checkpoint.
		for _, name := range s.names()[:4] {
			s.endContainer(name)
		}
		unharmed = s.unharmed()
		// To the kubelet, the node is now empty.
		s.burst(times(4, func() *corev1.Pod { return s.pod(3) })...)
		s.settle()
		unharmed()
		s.remove()
	})
	r.play(t, "a kubelet that has lost its checkpoint, and init containers that have ended", func(s *scene) {
		s.burst(times(6, func() *corev1.Pod { return s.pod(2, first("init", 2)) })...)
		s.settle()
		s.withoutCheckpoint(func() {})
		// The kubelet calls Allocate again for the init containers. By its own rule it fails the pods for which it does so before a
		// plugin has registered.
		s.burst(s.pod(1)) // the kubelet admits it after all others
		s.removeFailed(s.made)
		s.otherDevices = true
		s.settle()
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
	r.play(t, "bursts amid everything that can go", func(s *scene) {
		// A restarted kubelet admits pods before it has freed the devices of pods that went meanwhile. All its remaining free
		// devices may then belong to another card.
		s.otherDevices = true
		for range inLong(4, 1) {
			s.faultAmidBursts("the plugin killed three times", func() {
				for range 3 {
					s.anyMoment()
					must(s, s.node.plugin.Restart(s.Context()))
				}
			})
			s.faultAmidBursts("pods bound and deleted while the kubelet is away", func() {
				s.anyMoment()
				must(s, s.node.kubelet.Kill())
				s.makeRoom(s.used() - 4)
				s.burst(times(8, func() *corev1.Pod { return s.pod(1) })...)
				s.bound()
				must(s, s.node.kubelet.Start(s.Context()))
			})
			s.faultAmidBursts("the kubelet killed three times", func() {
				for range 3 {
					s.anyMoment()
					must(s, s.node.kubelet.Restart(s.Context()))
				}
			})
			s.faultAmidBursts("kubelet and plugin killed at once", func() {
				s.anyMoment()
				must(s, s.node.plugin.Kill())
				must(s, s.node.kubelet.Restart(s.Context()))
				must(s, s.node.plugin.Start(s.Context()))
			})
			s.faultAmidBursts("the API server away for 20 s, the plugin killed meanwhile", func() {
				s.anyMoment()
				must(s, s.bed.APIServer.Kill())
				time.Sleep(10 * time.Second)
				must(s, s.node.plugin.Restart(s.Context()))
				time.Sleep(10 * time.Second)
				must(s, s.bed.APIServer.Start(s.Context()))
			})
		}
	})
}

// TestLosses takes away what the node relies on: the API server, the Node object, the checkpoint, a card.
func TestLosses(t *testing.T) {
	r := startRig(t, cardMiB, cardMiB, 8138, cardMiB)
	defer r.report(t)

	r.play(t, "an API server that goes amid a burst", func(s *scene) {
		s.burst(times(4, func() *corev1.Pod { return s.pod(2) })...)
		s.settle()
		unharmed := s.unharmed()
		s.burst(times(8, func() *corev1.Pod { return s.pod(1, with("second", 1)) })...)
		must(s, s.bed.APIServer.Kill())
		must(s, s.bed.APIServer.Start(s.Context()))
		// A pod is rejected if the kubelet had received it just before and the plugin had not.
		s.removeFailed(4)
		s.settle()
		unharmed()
	})
	r.play(t, "a node object that is made anew", func(s *scene) {
		s.burst(times(6, func() *corev1.Pod { return s.pod(2, with("second", 1)) })...)
		s.settle()
		unharmed := s.unharmed()
		for range 2 {
			nodes := s.bed.Client.CoreV1().Nodes()
			must(s, nodes.Delete(s.Context(), s.node.name, metav1.DeleteOptions{}))
			must(s, s.node.kubelet.Restart(s.Context()))
			s.awaitCards() // It also checks the number of cards and the inventory.
			s.settle()
			unharmed()
			s.burst(times(4, func() *corev1.Pod { return s.pod(1) })...)
			s.settle()
		}
	})
	r.play(t, "a machine that starts again and has lost the kubelet's checkpoint", func(s *scene) {
		s.burst(times(10, func() *corev1.Pod { return s.shaped(1 + s.random.Int64N(4)) })...)
		s.settle()
		s.withoutCheckpoint(s.endContainers)
		s.burst(s.pod(1)) // the kubelet admits it after all others
		// By its own rule the kubelet fails pods for good that it admits before a plugin has registered.
		s.removeFailed(s.made)
		// If an init container had devices, the kubelet has no entry for them any more.
		s.otherDevices = true
		s.settle()
		s.burst(times(12, func() *corev1.Pod { return s.pod(1 + s.random.Int64N(2)) })...)
		s.removeFailed(s.made)
		s.settle()
	})
	r.play(t, "a card that fails and gets well", func(s *scene) {
		s.burst(times(8, func() *corev1.Pod { return s.pod(3) })...)
		s.settle()
		there := s.onCard(0)
		// The deletion makes this card the best fit for the next pods.
		s.delete(there[0])
		s.gone(leaving)
		there = there[1:]
		unharmed := s.unharmed()
		must(s, s.node.driver.Xid("0", 48))
		s.awaitHealth(0, false)
		// A restart of the plugin doesn't make the card healthy.
		must(s, s.node.plugin.Restart(s.Context()))
		s.awaitPlugin()
		// The kubelet's free amount is the memory of the healthy cards, minus the allocations on all cards.
		s.burst(times(4, func() *corev1.Pod { return s.pod(2) })...)
		s.settle()
		unharmed()
		if now := s.onCard(0); !slices.Equal(now, there) {
			s.Errorf("on the card that has failed are %v now, and were %v", now, there)
		}
		s.awaitHealth(0, true)
		s.awaitCards()
		unharmed()
		s.delete(there[:2]...)
		s.gone(leaving)
		s.burst(times(int(s.total()-s.used()), func() *corev1.Pod { return s.pod(1) })...)
		s.settle()
		if now := s.onCard(0); len(now) <= len(there)-2 {
			s.Errorf("on the card that is well again are %v", now)
		}
	})
}

// awaitPlugin waits until the plugin has reported its devices to the kubelet, healthy or not.
func (s *scene) awaitPlugin() {
	s.Helper()
	eventually(s, "the plugin is ready", func(ctx context.Context) error {
		_, err := framework.Fetch(ctx, s.node.metrics.URL("http")+"/readyz")
		return err
	})
}

// awaitHealth waits until the inventory lists a card as healthy, or as unhealthy.
func (s *scene) awaitHealth(card int, healthy bool) {
	s.Helper()
	eventually(s, fmt.Sprintf("card %d is healthy: %t", card, healthy), func(ctx context.Context) error {
		node, err := s.bed.Client.CoreV1().Nodes().Get(ctx, s.node.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		inventory, err := protocol.ParseInventory(node.Annotations)
		if err == nil && inventory.Cards[card].Healthy() != healthy {
			err = fmt.Errorf("the inventory says: %q", inventory.Cards[card].Unhealthy)
		}
		return err
	})
}

// onCard returns the names of the pods whose annotations name this card.
func (s *scene) onCard(card int) (names []string) {
	s.Helper()
	pods, err := s.list(s.Context())
	must(s, err)
	for i := range pods {
		if pods[i].Annotations[protocol.AnnotationIndex] == strconv.Itoa(card) {
			names = append(names, pods[i].Name)
		}
	}
	return names
}

// faultAmidBursts creates pods of all shapes and calls fault while they start. Then it waits until everything agrees, and
// checks that the pods that ran before are unharmed. It removes the pods that the kubelet failed, as it does if no device
// plugin is registered.
func (s *scene) faultAmidBursts(what string, fault func()) {
	s.Helper()
	s.Log(what)
	s.makeRoom(s.total() / 4)
	s.gone(leaving)
	unharmed := s.unharmed()
	var burst []*corev1.Pod
	for sum := s.total() / 2; sum > 0; {
		pod := s.shaped(min(sum, 1+s.random.Int64N(4)))
		sum -= memoryOf(pod)
		burst = append(burst, pod)
	}
	s.burst(burst...)
	fault()
	s.awaitCards()
	s.removeFailed(s.made)
	s.settle()
	unharmed()
}

// anyMoment waits a random time, so that the next fault has no fixed place in the sequence.
func (s *scene) anyMoment() {
	time.Sleep(time.Duration(s.random.IntN(400)) * time.Millisecond)
}

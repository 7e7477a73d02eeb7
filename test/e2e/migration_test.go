package e2e

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// TestMigration replaces the halves of Alibaba's gpushare, in either order, while its pods run.
func TestMigration(t *testing.T) {
	c := shared.Start(t)
	start := func(t *testing.T, name string) machine {
		return addMachine(t, c, framework.NodeSpec{Name: name, WithoutPlugin: true, Kubelet: simkubelet.Options{OmitResourceHealth: true}})
	}
	// The predecessor binds the pod: the extender is down, so kube-scheduler can't.
	place := func(s *scene, p *predecessor, name string, memory int64, card int) *corev1.Pod {
		s.Helper()
		s.Create(s.Pod(name, memory).OnNode(p.node.Name).Gate())
		s.Ungate(name)
		p.assume(name, card)
		return s.WaitAssigned(name)
	}

	first := start(t, "extender-first")
	playOn(t, c, first, "the extender first", func(s *scene) {
		must(s, c.Extender.Kill())
		p := &predecessor{scene: s, node: first, serving: startOldPlugin(s, first)}
		before := map[string]*corev1.Pod{
			"on-0": place(s, p, "on-0", 12207, 0),
			"on-1": place(s, p, "on-1", 8138, 1),
		}
		// The note of the predecessor's health check has no effect.
		note := &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "unhealthy-gpu-" + first.Name},
			Data:       map[string]string{"gpus": "1"},
		}
		_, err := c.Client.CoreV1().ConfigMaps(note.Namespace).Create(s.Context(), note, metav1.CreateOptions{})
		must(s, err)

		must(s, c.Extender.Start(s.Context()))
		s.CheckLedger()
		// The earlier pods count: 4069 are free on card 0 and 8138 on card 1.
		s.WantCard(s.Place(s.Pod("next", 6000).OnNode(first.Name)), first.Name, 1)
		s.Create(s.Pod("pending", 5000).OnNode(first.Name))
		s.rejected("pending", "no GPU card has enough free memory")
		// The predecessor's plugin allocates the card that this extender chose, and rewrites the assume time.
		before["next"] = s.WaitAssigned("next")
		s.wantRunning(first, before)

		p.serving.stop()
		must(s, c.StartPlugin(s.Context(), first.Node))
		s.CheckLedger()
		s.wantRunning(first, before)
		for name, pod := range before {
			if diff := cmp.Diff(pod.Annotations, s.Get(name).Annotations); diff != "" {
				s.Errorf("the annotations of pod %s (-before +now):\n%s", name, diff)
			}
		}
		s.DeleteWithGrace("on-0", 1)
		s.WaitGone("on-0")
		s.WantCard(s.WaitBound("pending"), first.Name, 0)
		s.waitContainers(first, "pending")
	})

	second := start(t, "node-first")
	playOn(t, c, second, "the node first", func(s *scene) {
		must(s, c.Extender.Kill())
		p := &predecessor{scene: s, node: second, serving: startOldPlugin(s, second)}
		before := map[string]*corev1.Pod{
			"on-0": place(s, p, "on-0", 12207, 0),
			"on-1": place(s, p, "on-1", 8138, 1),
		}
		p.serving.stop()
		must(s, c.StartPlugin(s.Context(), second.Node))
		s.wantRunning(second, before)
		// The predecessor's extender still binds pods.
		next := place(s, p, "next", 2000, 0)
		if got := next.Annotations[protocol.AnnotationAssumeTime]; got == "" || next.Annotations[protocol.AnnotationAssignTime] <= got {
			s.Errorf("pod next was assumed at %q and assigned at %q", got, next.Annotations[protocol.AnnotationAssignTime])
		}
		before["next"] = next
		s.waitContainers(second, "next")

		must(s, c.Extender.Start(s.Context()))
		s.CheckLedger()
		s.Create(s.Pod("pending", 8139).OnNode(second.Name))
		s.rejected("pending", "no GPU card has enough free memory")
		s.WantCard(s.Place(s.Pod("fits", 8138).OnNode(second.Name)), second.Name, 1)
		s.waitContainers(second, "fits")
		s.wantRunning(second, before)
	})
}

// wantRunning fails the test if a pod doesn't run on the card in its annotation, or was restarted.
func (s *scene) wantRunning(m machine, pods map[string]*corev1.Pod) {
	s.Helper()
	for name, pod := range pods {
		containers := s.containers(m, name)
		if len(containers) != 1 || !containers[0].Running || containers[0].Restarts != 0 {
			s.Errorf("the containers of pod %s are %+v, want one that has never been restarted", name, containers)
			continue
		}
		index, card, env := pod.Annotations[protocol.AnnotationIndex], m.Cards[s.CardOf(pod)], containers[0].Env
		if env[protocol.AnnotationIndex] != index || env[protocol.EnvVisibleDevices] != card.UUID {
			s.Errorf("pod %s has card %s (%s), but is annotated with %s", name, env[protocol.AnnotationIndex], env[protocol.EnvVisibleDevices], index)
		}
	}
}

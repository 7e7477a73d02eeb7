package e2e

import (
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// A cluster with Alibaba's gpushare becomes one with this, one half after the other, in either order, while its pods run.
func TestComingFromTheExistingOne(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{})
	machineOf := func(name string) machine {
		return addMachine(t, bed, framework.NodeSpec{Name: name, WithoutPlugin: true, Kubelet: simkubelet.Options{OmitResourceHealth: true}})
	}
	// Only the predecessor binds the pod: the extender that kube-scheduler asks is away.
	running := func(s *scene, p *predecessor, name string, memory int64, card int) *corev1.Pod {
		s.Helper()
		s.create(name, memory, gated, on(p.node.Name))
		s.ungate(name)
		p.assume(name, card)
		return s.assigned(name)
	}

	extenderFirst := machineOf("extender-first")
	playOn(t, bed, extenderFirst, "the scheduler's half first", func(s *scene) {
		must(s, bed.Extender.Kill())
		p := &predecessor{scene: s, node: extenderFirst, serving: startOldPlugin(t, s, extenderFirst)}
		before := map[string]*corev1.Pod{
			"on-0": running(s, p, "on-0", 12207, 0),
			"on-1": running(s, p, "on-1", 8138, 1),
		}
		// Whatever their health check has noted counts for nothing here.
		note := &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: "unhealthy-gpu-" + extenderFirst.Name},
			Data:       map[string]string{"gpus": "1"},
		}
		_, err := bed.Client.CoreV1().ConfigMaps(note.Namespace).Create(s.Context(), note, metav1.CreateOptions{})
		must(s, err)

		must(s, bed.Extender.Start(s.Context()))
		s.checkBooks()
		// The pods that ran before count: card 0 has 4069 left, card 1 has 8138.
		before["next"] = s.place("next", 6000, on(extenderFirst.Name))
		s.sits(before["next"], extenderFirst.Name, 1)
		s.create("waits", 5000, on(extenderFirst.Name))
		s.refused("waits", "no GPU card has enough free memory")
		// The other half is still theirs: it hands out what this one has chosen, and writes the assume time anew.
		before["next"] = s.assigned("next")
		s.holds(p, before)

		p.serving.stop()
		must(s, bed.StartPlugin(s.Context(), extenderFirst.Node))
		s.checkBooks()
		s.holds(p, before)
		for name, pod := range before {
			if now := s.get(name); !maps.Equal(now.Annotations, pod.Annotations) {
				s.Errorf("the annotations of pod %s were %v and are %v", name, pod.Annotations, now.Annotations)
			}
		}
		// Room on card 0, for the one that waits.
		must(s, s.delete("on-0", 1))
		s.gone("on-0")
		s.sits(s.bound("waits"), extenderFirst.Name, 0)
		s.awaitHanded(extenderFirst, "waits")
	})

	nodeFirst := machineOf("node-first")
	playOn(t, bed, nodeFirst, "the node's half first", func(s *scene) {
		must(s, bed.Extender.Kill())
		p := &predecessor{scene: s, node: nodeFirst, serving: startOldPlugin(t, s, nodeFirst)}
		before := map[string]*corev1.Pod{
			"on-0": running(s, p, "on-0", 12207, 0),
			"on-1": running(s, p, "on-1", 8138, 1),
		}
		p.serving.stop()
		must(s, bed.StartPlugin(s.Context(), nodeFirst.Node))
		s.holds(p, before)
		// The scheduler's half is still theirs.
		before["next"] = running(s, p, "next", 2000, 0)
		if got := before["next"].Annotations[protocol.AnnotationAssumeTime]; got == "" || before["next"].Annotations[protocol.AnnotationAssignTime] <= got {
			s.Errorf("pod next was assumed at %q and assigned at %q", got, before["next"].Annotations[protocol.AnnotationAssignTime])
		}
		s.awaitHanded(nodeFirst, "next")
		s.holds(p, before)

		must(s, bed.Extender.Start(s.Context()))
		s.checkBooks()
		s.create("waits", 8139, on(nodeFirst.Name))
		s.refused("waits", "no GPU card has enough free memory")
		s.sits(s.place("fits", 8138, on(nodeFirst.Name)), nodeFirst.Name, 1)
		s.awaitHanded(nodeFirst, "fits")
		s.holds(p, before)
	})
}

// holds checks that the pods run, were never started again, and sit on the card that their annotations name.
func (s *scene) holds(p *predecessor, pods map[string]*corev1.Pod) {
	s.Helper()
	for name, pod := range pods {
		index := pod.Annotations[protocol.AnnotationIndex]
		card := p.node.Cards[s.cardOf(pod)]
		containers := s.containers(p.node, name)
		if len(containers) != 1 || !containers[0].Running || containers[0].Restarts != 0 {
			s.Errorf("the containers of pod %s: %+v, want one that has run all the while", name, containers)
			continue
		}
		env := containers[0].Env
		if env[protocol.AnnotationIndex] != index || env[protocol.EnvVisibleDevices] != card.UUID {
			s.Errorf("pod %s has card %s (%s), its annotations say %s", name, env[protocol.AnnotationIndex], env[protocol.EnvVisibleDevices], index)
		}
	}
}

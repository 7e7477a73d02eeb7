package e2e

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// TestNode follows pods from the API server to their containers' environment, on nodes with the real device plugin.
func TestNode(t *testing.T) {
	c := shared.Start(t)
	m := addMachine(t, c, framework.NodeSpec{Name: "node", Kubelet: simkubelet.Options{OmitResourceHealth: true}})

	playOn(t, c, m, "pods of one size get the cards in their annotations, in whatever order the kubelet sees them", func(s *scene) {
		names := []string{"a", "b", "c", "d", "e", "f"}
		assumed := map[string]*corev1.Pod{}
		s.inOneBatch(m, func() {
			for _, name := range names {
				s.Create(s.Pod(name, 5000).OnNode(m.Name).Gate())
			}
			for i, name := range []string{"d", "f", "a", "c", "e", "b"} {
				s.Ungate(name)
				assumed[name] = s.WaitBound(name)
				s.WantCard(assumed[name], m.Name, i/3)
				if got := assumed[name].Annotations[protocol.AnnotationAssigned]; got != "false" {
					s.Errorf("before the node has seen %s, %s is %q", name, protocol.AnnotationAssigned, got)
				}
			}
		})
		s.checkContainers(m, names...)
		for name, before := range assumed {
			pod := s.Get(name)
			s.wantKept(before, pod)
			if pod.Annotations[protocol.AnnotationAssignTime] <= pod.Annotations[protocol.AnnotationAssumeTime] {
				s.Errorf("%s was assigned at %s, before it was assumed", name, pod.Annotations[protocol.AnnotationAssignTime])
			}
		}
	})

	playOn(t, c, m, "while NVIDIA's DRA driver offers the cards in a ResourceSlice too, the node is rejected", func(s *scene) {
		slices := c.Client.ResourceV1().ResourceSlices()
		slice := &resourcev1.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: "cards-of-" + m.Name},
			Spec: resourcev1.ResourceSliceSpec{
				Driver: protocol.DRADriver, NodeName: &m.Name, Pool: resourcev1.ResourcePool{Name: m.Name, ResourceSliceCount: 1},
				Devices: []resourcev1.Device{{Name: "gpu-0"}},
			},
		}
		_, err := slices.Create(t.Context(), slice, metav1.CreateOptions{})
		must(s, err)
		s.Eventually("the node is warned about", func(ctx context.Context) error {
			events, err := c.Client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "reason=GPUCardSharedTwice"})
			if err == nil && len(events.Items) == 0 {
				err = errors.New("it has no Event")
			}
			return err
		})
		s.CheckLedger()
		s.Create(s.Pod("pod", 1024).OnNode(m.Name))
		s.rejected("pod", "1 the node also offers its cards by nvidia.com/gpu or DRA, which excludes sharing them")
		must(s, slices.Delete(t.Context(), slice.Name, metav1.DeleteOptions{}))
		s.checkContainers(m, "pod")
	})

	// As kubelets 1.34 and 1.35.
	shows := addMachine(t, c, framework.NodeSpec{Name: "shows", Kubelet: simkubelet.Options{OmitResourceHealth: true, ShowRejected: true}})
	playOn(t, c, shows, "a rejected pod that the kubelet still lists is not taken for the next pod", func(s *scene) {
		var next *corev1.Pod
		s.inOneBatch(shows, func() {
			rejected := s.Place(s.Pod("rejected", 12207).OnNode(shows.Name).Annotation(simkubelet.AnnotationRejected, "Evicted"))
			s.WantCard(rejected, shows.Name, 0)
			s.nextSecond(rejected)
			next = s.Place(s.Pod("next", 12207).OnNode(shows.Name))
			s.WantCard(next, shows.Name, 1)
		})
		s.WaitPod("rejected", "is rejected", func(pod *corev1.Pod) bool { return pod.Status.Reason == "Evicted" })
		s.checkContainers(shows, "next")
		s.wantKept(next, s.Get("next"))
	})

	playOn(t, c, m, "pods with a nodeName are counted, and their annotations are not trusted", func(s *scene) {
		s.WantCard(s.Place(s.Pod("honest", 12207).OnNode(m.Name)), m.Name, 0)
		s.WaitAssigned("honest")
		s.Create(s.Pod("bare", 5000).Node(m.Name))
		s.WantCard(s.waitContainers(m, "bare"), m.Name, 1)
		s.Create(s.Pod("forged", 5000).Node(m.Name).Annotations(map[string]string{
			protocol.AnnotationIndex: "0", protocol.AnnotationPod: "1", protocol.AnnotationDevice: "999999",
			protocol.AnnotationAssumeTime: "1", protocol.AnnotationAssigned: "false",
		}))
		s.WantCard(s.waitContainers(m, "forged"), m.Name, 1)
		// 4069 and 6276 are free. A pod that fits their sum but no card is rejected by the node.
		s.Create(s.Pod("too-much", 10000).Node(m.Name).Annotation(protocol.AnnotationIndex, "0").Annotation(protocol.AnnotationPod, "1"))
		s.WaitPhase("too-much", corev1.PodFailed)
		s.WantCard(s.Place(s.Pod("scheduled", 6276).OnNode(m.Name)), m.Name, 1)
		s.checkContainers(m, "scheduled")
	})

	playOn(t, c, m, "the device plugin is terminated", func(s *scene) {
		for _, name := range []string{"before-0", "before-1"} {
			s.Place(s.Pod(name, 9000).OnNode(m.Name))
			s.WaitAssigned(name)
		}
		before := m.Kubelet.Containers()
		terminate(s, m.Plugin)
		s.waitAllocatable(m, 0)
		meanwhile := s.rejectedWithoutPlugin(m)
		must(s, m.Plugin.Start(s.Context()))
		s.checkContainers(m, meanwhile, "before-0", "before-1")
		if diff := cmp.Diff(before, s.containers(m, "before-0", "before-1")); diff != "" {
			s.Errorf("the earlier containers have changed:\n%s", diff)
		}
	})
}

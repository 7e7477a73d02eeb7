package nodee2e

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// TestWithoutPodResources: the plugin can't find out through PodResources which pod the kubelet serves, as before
// Kubernetes 1.34. Pod matching then relies on the order of the pods only, which is sometimes wrong. The containers'
// environments are then the truth, and everything else must be repaired to agree with them.
func TestWithoutPodResources(t *testing.T) {
	r := startRig(t, cardMiB, cardMiB, cardMiB, cardMiB)
	defer r.report(t)
	must(t, r.node.restartPlugin(t.Context(), "--pod-resources-socket="+filepath.Join(r.node.machine.dir, "nowhere.sock")))
	r.awaitCards(t)

	for _, burst := range []struct {
		pods   int
		memory int64
	}{{8, 5}, {16, 3}, {40, 1}} {
		r.play(t, fmt.Sprintf("a burst of %d pods of one size", burst.pods), func(s *scene) {
			s.burst(times(burst.pods, func() *corev1.Pod { return s.pod(burst.memory) })...)
		})
	}
	r.play(t, "pods bound while the kubelet was away", func(s *scene) {
		for range inLong(4, 1) {
			s.makeRoom(0)
			s.gone(leaving)
			// The checkpoint contains deleted pods until the kubelet writes it again. A restarted kubelet counts their devices as
			// used.
			s.burst(s.pod(1))
			s.settle()
			must(s, s.node.kubelet.Kill())
			s.burst(times(10, func() *corev1.Pod { return s.pod(2) })...)
			s.burst(times(20, func() *corev1.Pod { return s.pod(1) })...)
			s.bound()
			must(s, s.node.kubelet.Start(s.Context()))
			s.removeFailed(s.made)
			s.settle()
		}
	})
	r.play(t, "pods of all shapes that come and go", func(s *scene) {
		s.guessing = true
		s.churnWithRoom(inLong(100, 40), s.total()*3/4)
	})
}

// TestStaticPods: a static pod gets no memory of a card, and the pods on the node are unaffected.
func TestStaticPods(t *testing.T) {
	r := startRig(t, cardMiB, cardMiB)
	defer r.report(t)
	r.play(t, "refused, also by a kubelet that starts with it", func(s *scene) {
		s.burst(times(4, func() *corev1.Pod { return s.pod(3) })...)
		s.settle()
		unharmed := s.unharmed()
		static := s.pod(2)
		must(s, s.node.addStatic(static))
		s.Cleanup(func() {
			if err := s.node.removeStatic(static.Namespace, static.Name); err != nil {
				s.Error(err)
			}
		})
		s.refusedOnNode("no pod that the API server has on this node waits for 2 of GPU memory, and static pods are not supported")
		s.settle()
		must(s, s.node.kubelet.Restart(s.Context()))
		s.awaitCards()
		// The static pod has no allocation: the node can be filled to the last unit.
		s.burst(times(18, func() *corev1.Pod { return s.pod(1) })...)
		s.settle()
		unharmed()
	})
}

// refusedOnNode waits for an Event of the node with the reason why a container was rejected.
func (s *scene) refusedOnNode(why string) {
	s.Helper()
	eventually(s, "the node has an event: "+why, func(ctx context.Context) error {
		events, err := s.bed.Client.CoreV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.kind=Node,reason=GPUCardRefused"})
		if err != nil {
			return err
		}
		for _, event := range events.Items {
			if strings.Contains(event.Message, why) {
				return nil
			}
		}
		return fmt.Errorf("there are %d", len(events.Items))
	})
}

// TestCDI: with --device-list-strategy=cdi-cri the container also gets the card as a CDI device. The device is in the
// plugin's answer, as the kubelet's checkpoint keeps it, and in the kubelet's request to the container runtime. The test
// doesn't cover the runtime itself, because Debian's containerd is too old for CDI devices in the request.
func TestCDI(t *testing.T) {
	r := startRig(t, cardMiB, cardMiB)
	defer r.report(t)
	cri := watchCRI(t, r.node.outside("lib/cri.sock"), r.node.machine.path("run/containerd/containerd.sock"))
	must(t, r.node.kubelet.Kill())
	must(t, r.node.configureKubelet("/var/lib/cri.sock"))
	must(t, r.node.kubelet.Start(t.Context()))
	must(t, r.node.restartPlugin(t.Context(), "--device-list-strategy=cdi-cri"))
	r.awaitCards(t)
	r.play(t, "every container is given the device of its card", func(s *scene) {
		s.burst(times(6, func() *corev1.Pod { return s.pod(2, with("second", 1)) })...)
		s.burst(times(3, func() *corev1.Pod { return s.pod(1, first("init", 2)) })...)
		s.settle()
		pods, err := s.list(s.Context())
		must(s, err)
		answers, err := s.node.answers()
		must(s, err)
		asked, err := cri.asked()
		must(s, err)
		for i := range pods {
			card, err := strconv.Atoi(pods[i].Annotations[protocol.AnnotationIndex])
			must(s, err)
			want := []string{"nvidia.com/gpu=" + cardUUID(card)}
			for _, c := range slices.Concat(pods[i].Spec.InitContainers, pods[i].Spec.Containers) {
				var got []string
				for _, device := range answers[containerOf{string(pods[i].UID), c.Name}].GetCdiDevices() {
					got = append(got, device.Name)
				}
				if !slices.Equal(got, want) {
					s.Errorf("container %s of pod %s was given the CDI devices %v, want %v", c.Name, pods[i].Name, got, want)
				}
				if got := asked[containerOf{string(pods[i].UID), c.Name}]; !slices.Equal(got, want) {
					s.Errorf("the kubelet asks for the CDI devices %v for container %s of pod %s, want %v", got, c.Name, pods[i].Name, want)
				}
			}
		}
	})
}

// answers returns the plugin's answers by container, as the kubelet's checkpoint keeps them.
func (n *node) answers() (map[containerOf]*pluginapi.ContainerAllocateResponse, error) {
	checkpoint, err := simkubelet.ReadCheckpoint(n.checkpoint())
	if err != nil {
		return nil, err
	}
	out := map[containerOf]*pluginapi.ContainerAllocateResponse{}
	for _, entry := range checkpoint.PodDeviceEntries {
		if entry.ResourceName != string(protocol.ResourceMemory) {
			continue
		}
		if out[containerOf{entry.PodUID, entry.ContainerName}], err = entry.Response(); err != nil {
			return nil, err
		}
	}
	return out, nil
}

package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/simkubelet/checkpoint"
)

// A kubelet that can't be asked which pod it is serving, as before Kubernetes 1.34: order alone tells, and misleads
// now and then. What the containers got is the truth then, to which everything else has to come.
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
			// Its checkpoint has pods that have gone until it is written anew, and when the kubelet starts it holds their
			// devices against others.
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

// Pods that the kubelet has from a file of the node.
func TestStaticPods(t *testing.T) {
	r := startRig(t, cardMiB, cardMiB)
	defer r.report(t)
	r.play(t, "among others, through restarts of the kubelet and the plugin", func(s *scene) {
		s.burst(times(4, func() *corev1.Pod { return s.pod(3) })...)
		s.settle()
		s.static(s.pod(2, with("plain", 0)), s.pod(1, with("second", 2)), s.pod(2, beside("sidecar", 1)))
		s.settle()
		unharmed := s.unharmed()
		must(s, s.node.plugin.Restart(s.Context()))
		s.awaitCards()
		s.settle()
		must(s, s.node.kubelet.Restart(s.Context()))
		s.awaitCards()
		s.settle()
		unharmed()
		// Not before: for an init container that has ended a kubelet that starts asks anew, and for those of static pods before a
		// plugin can be sure to have registered. It fails them then.
		s.static(s.pod(1, first("init", 3)))
		s.settle()
		// What is left, to the last unit.
		s.burst(times(7, func() *corev1.Pod { return s.pod(1) })...)
		s.settle()
		unharmed()
	})
	r.play(t, "that go and come again", func(s *scene) {
		for range 2 {
			remove := s.static(s.pod(10), s.pod(6, with("second", 2)), s.pod(4))
			s.settle()
			remove()
			s.burst(times(2, func() *corev1.Pod { return s.pod(15) })...)
			s.settle()
			s.remove()
		}
	})
}

// static gives the kubelet pods by files, and awaits their mirrors. They are removed when the scene ends, or before.
func (s *scene) static(pods ...*corev1.Pod) (remove func()) {
	s.Helper()
	for _, pod := range pods {
		must(s, s.node.addStatic(pod))
	}
	mirrored := func(present bool) func(context.Context) error {
		return func(ctx context.Context) error {
			listed, err := s.list(ctx)
			if err != nil {
				return err
			}
			for _, pod := range pods {
				name := pod.Name + "-" + s.node.name
				if slices.ContainsFunc(listed, func(p corev1.Pod) bool { return p.Name == name }) != present {
					return fmt.Errorf("the mirror pod %s: there should be one: %t", name, present)
				}
			}
			return nil
		}
	}
	removeFiles := func() {
		for _, pod := range pods {
			if err := s.node.removeStatic(pod.Namespace, pod.Name); err != nil && !errors.Is(err, os.ErrNotExist) {
				s.Error(err)
			}
		}
	}
	s.Cleanup(removeFiles)
	eventually(s, "the static pods have mirrors", mirrored(true))
	return func() {
		removeFiles()
		eventually(s, "the static pods are gone", mirrored(false))
	}
}

// With --device-list-strategy=cdi-cri the card goes to the container as a CDI device too: it is in the plugin's answer, as
// the kubelet's checkpoint keeps it, and in what the kubelet asks of the container runtime. What a runtime makes of that
// isn't tested here: Debian's containerd is too old to know of it.
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

// answers are the plugin's, by container, as the kubelet's checkpoint keeps them.
func (n *node) answers() (map[containerOf]*pluginapi.ContainerAllocateResponse, error) {
	entries, _, err := checkpoint.Read(n.checkpoint())
	if err != nil {
		return nil, err
	}
	out := map[containerOf]*pluginapi.ContainerAllocateResponse{}
	for _, entry := range entries {
		if entry.ResourceName != string(protocol.ResourceMemory) {
			continue
		}
		answer := &pluginapi.ContainerAllocateResponse{}
		if err := proto.Unmarshal(entry.AllocResp, answer); err != nil {
			return nil, fmt.Errorf("the answer for container %s of pod %s: %w", entry.ContainerName, entry.PodUID, err)
		}
		out[containerOf{entry.PodUID, entry.ContainerName}] = answer
	}
	return out, nil
}

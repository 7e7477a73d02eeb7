package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/framework"
	"github.com/gpushare/gpushare/test/simkubelet"
)

// machine is a node with the real device plugin, and a record of its kubelet's calls.
type machine struct {
	*framework.Node
	calls *trace
}

// addMachine starts a node for the rest of the test, with two cards if the spec has none.
func addMachine(t *testing.T, c *framework.Cluster, spec framework.NodeSpec) machine {
	t.Helper()
	calls := &trace{}
	spec.KubeletThroughProxy, spec.Kubelet.Trace = true, calls.add
	if spec.Cards == nil {
		spec.Cards = []uint64{cardMiB, cardMiB}
	}
	return machine{c.AddNodeForTest(t, spec), calls}
}

// playOn runs a scene with pods on a machine. At its end it also checks the memory of the machine's containers.
func playOn(t *testing.T, c *framework.Cluster, m machine, title string, act func(s *scene)) {
	t.Helper()
	play(t, c, title, func(s *scene) {
		s.Kubelets = true
		act(s)
		used := map[string]int64{}
		for _, container := range m.Kubelet.Containers() {
			if memory, err := strconv.ParseInt(container.Env[protocol.EnvContainer], 10, 64); err == nil && container.Running {
				used[container.Env[protocol.EnvVisibleDevices]] += memory
			}
		}
		for card, memory := range used {
			if memory > int64(m.Cards[0].MiB) {
				s.Errorf("the containers on card %s use %d of %d", card, memory, m.Cards[0].MiB)
			}
		}
	})
}

// inOneBatch runs act while the kubelet can't reach the API server, and restarts the kubelet before it can again. Thus the
// kubelet receives all pods at once, when the device plugin has registered.
func (s *scene) inOneBatch(m machine, act func()) {
	s.Helper()
	heal := m.Proxy.Blackhole()
	defer heal()
	act()
	before := m.calls.lists()
	// With its checkpoint, the kubelet would not use the devices of earlier pods until it has seen that these are gone.
	must(s, m.Kubelet.RestartWithoutCheckpoint(s.Context()))
	s.Eventually("the device plugin has registered again", func(context.Context) error {
		if m.calls.lists() == before {
			return errors.New("the kubelet has received no devices")
		}
		return nil
	})
}

// nextSecond waits until the second in which the pod was created is over. The kubelet compares the ages of pods in seconds.
func (s *scene) nextSecond(pod *corev1.Pod) {
	s.Helper()
	s.Eventually("the next second begins", func(context.Context) error {
		if pod.CreationTimestamp.Unix() == time.Now().Unix() {
			return errors.New("it has not begun")
		}
		return nil
	})
}

// waitAllocatable waits until the node has this GPU memory.
func (s *scene) waitAllocatable(m machine, want int64) {
	s.Helper()
	s.Eventually(fmt.Sprintf("node %s has %d of GPU memory", m.Name, want), func(ctx context.Context) error {
		object, err := s.Cluster.Client.CoreV1().Nodes().Get(ctx, m.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got := object.Status.Allocatable[protocol.ResourceMemory]; got.Value() != want {
			return fmt.Errorf("it has %s", got.String())
		}
		return nil
	})
}

// wantKept fails the test if annotations that the extender wrote at bind have changed.
func (s *scene) wantKept(before, pod *corev1.Pod) {
	s.Helper()
	for _, name := range []string{protocol.AnnotationAssumeTime, protocol.AnnotationIndex, protocol.AnnotationPod, protocol.AnnotationDevice} {
		if pod.Annotations[name] != before.Annotations[name] {
			s.Errorf("%s of pod %s was %q at bind and is %q now", name, pod.Name, before.Annotations[name], pod.Annotations[name])
		}
	}
}

// waitContainers waits until the pods run, and their containers have what the pods' annotations name.
func (s *scene) waitContainers(m machine, names ...string) (pod *corev1.Pod) {
	s.Helper()
	for _, name := range names {
		s.Eventually("the containers of pod "+name+" have what its annotations name", func(ctx context.Context) (err error) {
			if pod, err = s.Pods().Get(ctx, name, metav1.GetOptions{}); err != nil {
				return err
			}
			if pod.Status.Phase != corev1.PodRunning || pod.Annotations[protocol.AnnotationAssigned] != "true" {
				return fmt.Errorf("the pod is %s (%s: %s) with annotations %v: %v",
					pod.Status.Phase, pod.Status.Reason, pod.Status.Message, pod.Annotations, s.Events(ctx, name))
			}
			return s.containersDiffer(ctx, m, pod)
		})
	}
	return pod
}

// checkContainers waits until the pods are assigned. Their containers must then have what the pods' annotations name.
func (s *scene) checkContainers(m machine, names ...string) {
	s.Helper()
	for _, name := range names {
		check.NoError(s, s.containersDiffer(s.Context(), m, s.WaitAssigned(name)))
	}
}

// containersDiffer returns an error if a GPU container of the pod has another environment than the pod's annotations and the
// node's inventory give, or a container without GPU memory has one.
func (s *scene) containersDiffer(ctx context.Context, m machine, pod *corev1.Pod) error {
	object, err := s.Cluster.Client.CoreV1().Nodes().Get(ctx, m.Name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	inventory, err := protocol.ParseInventory(object.Annotations)
	if err != nil {
		return err
	}
	uuid := ""
	for _, card := range inventory.Cards {
		if strconv.Itoa(card.Index) == pod.Annotations[protocol.AnnotationIndex] {
			uuid = card.UUID
		}
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		var want map[string]string
		if memory, ok := c.Resources.Limits[protocol.ResourceMemory]; ok {
			want = map[string]string{
				protocol.AnnotationIndex:   pod.Annotations[protocol.AnnotationIndex],
				protocol.AnnotationPod:     fmt.Sprint(framework.GPUMemOf(pod)),
				protocol.AnnotationDevice:  fmt.Sprint(cardMiB),
				protocol.EnvContainer:      fmt.Sprint(memory.Value()),
				protocol.EnvVisibleDevices: uuid,
			}
		}
		got := m.Kubelet.Env(pod.UID, c.Name)
		if len(got) == 0 && len(want) == 0 {
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("container %s of pod %s with annotations %v (-want +got):\n%s", c.Name, pod.Name, pod.Annotations, diff)
		}
	}
	return nil
}

// containers returns the containers of these pods of the scene that run or have run.
func (s *scene) containers(m machine, pods ...string) []simkubelet.Container {
	return slices.DeleteFunc(m.Kubelet.Containers(), func(c simkubelet.Container) bool {
		return c.Namespace != s.ID || !slices.Contains(pods, c.Name)
	})
}

// trace has the calls of a kubelet.
type trace struct {
	mu     sync.Mutex
	events []simkubelet.Event
}

func (c *trace) add(e simkubelet.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events = append(c.events, e)
}

// lists returns the number of lists of devices that the kubelet has received.
func (c *trace) lists() int {
	return len(slices.DeleteFunc(c.of(simkubelet.CallListAndWatch), func(e simkubelet.Event) bool { return e.Err != nil }))
}

// of returns the calls of one kind, in the order in which they ended.
func (c *trace) of(call simkubelet.Call) (out []simkubelet.Event) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, e := range c.events {
		if e.Call == call {
			out = append(out, e)
		}
	}
	return out
}

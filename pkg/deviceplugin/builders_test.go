package deviceplugin

import (
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

var start = time.Unix(1_700_000_000, 0)

const testNode = "node-1"

// podOption changes a pod under construction.
type podOption = fake.PodEdit

// newPod returns a pod bound to the test's node, with the UID "uid-NAME", created at start and without containers.
func newPod(name string, options ...podOption) *corev1.Pod {
	empty := func(pod *corev1.Pod) { pod.Spec.Containers = nil }
	return fake.Pod(name, 0, append([]podOption{fake.On(testNode), created(0), empty}, options...)...)
}

func newContainer(name string, memory int64) corev1.Container {
	c := corev1.Container{Name: name}
	if memory > 0 {
		c.Resources.Limits = fake.Amount(protocol.ResourceMemory, memory)
		c.Resources.Requests = c.Resources.Limits
	}
	return c
}

func container(name string, memory int64) podOption {
	return func(pod *corev1.Pod) { pod.Spec.Containers = append(pod.Spec.Containers, newContainer(name, memory)) }
}

// initStep adds the init container "i".
func initStep(memory int64) podOption {
	return func(pod *corev1.Pod) {
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, newContainer("i", memory))
	}
}

func sidecar(name string, memory int64) podOption {
	return func(pod *corev1.Pod) {
		always := corev1.ContainerRestartPolicyAlways
		c := newContainer(name, memory)
		c.RestartPolicy = &always
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, c)
	}
}

// main adds the only container of a simple pod.
func main(memory int64) podOption { return container("main", memory) }

// assumed sets the extender's annotations; at is in seconds after start.
func assumed(card int, at int) podOption {
	return func(pod *corev1.Pod) {
		annotate(pod, protocol.Assignment{
			Cards: []protocol.AssignedCard{{Index: card, Memory: 16}}, Request: protocol.PodRequest(pod), AssumeTime: start.Add(time.Duration(at) * time.Second),
		}.Annotations())
	}
}

func assigned(pod *corev1.Pod) { annotate(pod, protocol.AssignedAnnotations(start)) }

func annotate(pod *corev1.Pod, annotations map[string]string) {
	for key, value := range annotations {
		metav1.SetMetaDataAnnotation(&pod.ObjectMeta, key, value)
	}
}

// created sets the creation time, in seconds after start.
func created(at int) podOption {
	return func(pod *corev1.Pod) {
		pod.CreationTimestamp = metav1.NewTime(start.Add(time.Duration(at) * time.Second))
	}
}

func revision(v string) podOption {
	return func(pod *corev1.Pod) { pod.ResourceVersion = v }
}

// ran marks the container "main" as one that has run, and as running now if running is true.
func ran(running bool) podOption {
	return func(pod *corev1.Pod) {
		status := corev1.ContainerStatus{Name: "main", ContainerID: "containerd://1"}
		if running {
			status.State.Running = &corev1.ContainerStateRunning{}
		}
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, status)
	}
}

// mirrors makes the pod the mirror pod of a static pod.
func mirrors(uid string) podOption { return fake.Annotation(corev1.MirrorPodAnnotationKey, uid) }

// newCards returns healthy cards of these sizes, in units.
func newCards(sizes ...gpu.Memory) []gpu.Card {
	cards := make([]gpu.Card, len(sizes))
	for i, size := range sizes {
		cards[i] = gpu.Card{Index: i, UUID: "GPU-" + strconv.Itoa(i), Memory: size, NUMANode: gpu.NoNUMANode}
	}
	return cards
}

func newQuantity(n int64) *resource.Quantity { return resource.NewQuantity(n, resource.DecimalSI) }

// giveOne returns the allocation of this memory on a card of 16 units.
func giveOne(card int, memory gpu.Memory) allocation.Allocation {
	return allocation.Give(allocation.Container{Request: memory}, []gpu.Card{{Index: card, Memory: 16}})
}

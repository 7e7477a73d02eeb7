package deviceplugin

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// A container runtime doesn't find the CDI device of a card. The kubelet tries the container again and again, with the same message.
func TestUnresolvedDevice(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(16)
	pod := newPod("a", main(2), assumed(0, 1))
	b.create(p, pod)
	k.mustAdmit(pod)
	for range 2 {
		waiting := b.pod("a")
		waiting.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{
			Reason: "CreateContainerError", Message: "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=GPU-0",
		}}}}
		if _, err := b.client.CoreV1().Pods("default").UpdateStatus(t.Context(), waiting, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	b.awaitEvent("GPUDeviceNotFound container main: CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=GPU-0: the container runtime")
	next := newPod("next", main(2), assumed(0, 2))
	b.create(p, next)
	k.mustAdmit(next)
	b.awaitAssigned("next", 0)
	for len(b.events.Events) > 0 {
		if event := <-b.events.Events; strings.Contains(event, "GPUDeviceNotFound") {
			t.Errorf("a second Event: %s", event)
		}
	}
}

func TestReadPod(t *testing.T) {
	runs := func(name string) podOption {
		return func(pod *corev1.Pod) {
			pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, corev1.ContainerStatus{
				Name: name, ContainerID: "containerd://" + name, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}},
			})
		}
	}
	one := []allocation.Container{{Name: "main", Request: 2}}
	for name, test := range map[string]struct {
		pod  *corev1.Pod
		want allocation.Pod // Without what all rows have.
	}{
		"containers in the order of admission": {
			newPod("a", container("x", 2), container("none", 0), container("y", 1), initStep(9), sidecar("s", 2), revision("17")),
			allocation.Pod{Pod: gpu.Pod{Request: 9, Containers: 3}, Version: 17, Containers: []allocation.Container{
				{Name: "i", Request: 9, Init: true}, {Name: "s", Request: 2}, {Name: "x", Request: 2}, {Name: "y", Request: 1},
			}, AppRequests: []gpu.Memory{2, 0, 1}},
		},
		"an init container has ended if a container runs": {
			newPod("a", initStep(2), main(2), container("y", 1), runs("main")),
			allocation.Pod{Pod: gpu.Pod{Request: 3, Containers: 2}, Ran: true, Containers: []allocation.Container{
				{Name: "i", Request: 2, Init: true, Running: true}, {Name: "main", Request: 2, Running: true}, {Name: "y", Request: 1},
			}, AppRequests: []gpu.Memory{2, 1}},
		},
		"a pod that has run": {
			newPod("a", main(2), ran(false)),
			allocation.Pod{Pod: gpu.Pod{Request: 2}, Ran: true, Containers: one, AppRequests: []gpu.Memory{2}},
		},
		"the request is read from the spec": {
			newPod("a", main(2), fake.Annotation("ALIYUN_COM_GPU_MEM_POD", "5"), mirrors("static"), func(pod *corev1.Pod) { pod.Status.Phase = corev1.PodFailed }),
			allocation.Pod{Pod: gpu.Pod{Request: 2}, Mirror: true, Ended: true, Containers: one, AppRequests: []gpu.Memory{2}},
		},
		"an invalid card": {
			newPod("a", main(2), fake.Annotation("ALIYUN_COM_GPU_MEM_IDX", "-1"), fake.Annotation("ALIYUN_COM_GPU_MEM_ASSUME_TIME", "yesterday"),
				fake.Annotation("ALIYUN_COM_GPU_MEM_ASSIGNED", "true")),
			allocation.Pod{
				Pod: gpu.Pod{Request: 2}, HasAssumeTime: true, Assigned: true, Containers: one, AppRequests: []gpu.Memory{2},
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			test.want.UID, test.want.Namespace, test.want.Name, test.want.Created = "uid-a", "default", "a", start
			check.Equal(t, "the result", test.want, readPod(test.pod))
		})
	}
}

// TestReadCards: which cards a pod has, as the node reads it.
func TestReadCards(t *testing.T) {
	allocation := func(value string) podOption { return fake.Annotation(protocol.AnnotationAllocation, value) }
	index := func(value string) podOption { return fake.Annotation(protocol.AnnotationIndex, value) }
	for name, test := range map[string]struct {
		pod     *corev1.Pod
		want    []int // The cards of the assignment; nil if it doesn't count.
		cards   int   // How many the pod has.
		invalid bool
	}{
		"one card":                           {newPod("a", main(4), assumed(1, 1)), []int{1}, 1, false},
		"several cards":                      {newPod("a", main(4), labelled("2"), assumedOn(1, 0, 2)), []int{0, 2}, 2, false},
		"in another order":                   {newPod("a", main(4), assumedOn(1, 2, 0)), []int{0, 2}, 2, false},
		"the label has changed since":        {newPod("a", main(4), labelled("4"), assumedOn(1, 0, 2)), []int{0, 2}, 2, false},
		"it has become invalid since":        {newPod("a", main(4), labelled("3"), assumedOn(1, 0, 2)), []int{0, 2}, 2, true},
		"one card, although the label has 2": {newPod("a", main(4), labelled("2"), assumed(1, 1)), []int{1}, 1, false},
		"no assignment":                      {newPod("a", main(4), labelled("2")), nil, 2, false},
		"an invalid label":                   {newPod("a", main(4), labelled("two")), nil, 0, true},
		"a request that can't be divided":    {newPod("a", main(3), labelled("2")), nil, 2, true},
		"cores that can't be divided":        {newPod("a", main(4), fake.Cores(5), assumedOn(1, 0, 2)), nil, 0, false},
		"a list of cards alone":              {newPod("a", main(4), index("0,1")), []int{0, 1}, 2, false},
		"other cards in the allocation":      {newPod("a", main(4), assumedOn(1, 0, 1), index("0,2")), nil, 0, false},
		"an allocation of less":              {newPod("a", main(4), assumedOn(1, 0, 1), allocation(`{"0":{"0":1,"1":1}}`)), nil, 0, false},
		"an uneven allocation":               {newPod("a", main(4), assumedOn(1, 0, 1), allocation(`{"0":{"0":1,"1":3}}`)), nil, 0, false},
		"an allocation that can't be divided by container": {
			newPod("a", main(1), container("second", 3), assumedOn(1, 0, 1), allocation(`{"0":{"0":2,"1":2}}`)), nil, 0, false,
		},
	} {
		t.Run(name, func(t *testing.T) {
			pod := readPod(test.pod)
			if got := pod.Assignment.Indexes(); !slices.Equal(got, test.want) || pod.Assumed != (test.want != nil) {
				t.Errorf("the assignment has %v, assumed %t; want %v", got, pod.Assumed, test.want)
			}
			if pod.Cards != test.cards || (pod.Invalid != nil) != test.invalid {
				t.Errorf("%d cards, invalid: %v; want %d, %t", pod.Cards, pod.Invalid, test.cards, test.invalid)
			}
		})
	}
}

func TestTransformPod(t *testing.T) {
	object := newPod("a", main(2), assumed(1, 1), ran(true))
	got, err := transformPod(object)
	check.Must(t, err)
	want := &podInfo{
		ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "default", UID: "uid-a"}, pod: readPod(object), instances: map[string]string{"main": "containerd://1"},
	}
	check.Equal(t, "the result", want, got, cmp.AllowUnexported(podInfo{}))
}

package diagnosis

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// A pod was bound without the extender if its creator set no nodeName and no scheduler chose its cards.
func TestBoundWithoutExtender(t *testing.T) {
	// by is a record of the API server that a client set fields of the spec.
	by := func(manager, fields string) fake.PodEdit {
		return func(pod *corev1.Pod) {
			pod.ManagedFields = append(pod.ManagedFields, metav1.ManagedFieldsEntry{
				Manager: manager, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(fmt.Sprintf(`{"f:metadata":{"f:labels":{}},"f:spec":{%s}}`, fields)),
			})
		}
	}
	created := by("kube-controller-manager", `"f:containers":{"k:{\"name\":\"main\"}":{".":{}}},"f:schedulerName":{}`)
	withNode := by("kubectl-create", `"f:containers":{},"f:nodeName":{}`)
	kubelet := func(pod *corev1.Pod) {
		pod.ManagedFields = append(pod.ManagedFields, metav1.ManagedFieldsEntry{
			Manager: "kubelet", Subresource: "status", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(`{"f:status":{"f:phase":{}}}`),
		})
	}
	// annotated sets the annotations of an assignment to card 0.
	annotated := func(a protocol.Assignment) fake.PodEdit {
		return func(pod *corev1.Pod) {
			a.Cards, a.Request = []protocol.AssignedCard{{Index: 0, Memory: 16}}, protocol.PodRequest(pod)
			for key, value := range a.Annotations() {
				fake.Annotation(key, value)(pod)
			}
		}
	}
	at, later := time.Unix(1, 5), time.Unix(2, 0)
	onNode := fake.On("n1")
	for name, test := range map[string]struct {
		memory int64
		edits  []fake.PodEdit
		want   bool
	}{
		"bound, and nothing chose a card":           {8, []fake.PodEdit{created, onNode}, true},
		"the kubelet has reported the pod's status": {8, []fake.PodEdit{created, onNode, kubelet}, true},
		"the node chose the card":                   {8, []fake.PodEdit{created, onNode, annotated(protocol.Assignment{AssumeTime: at, Assigned: true, AssignTime: at})}, true},
		"pending":                                   {8, []fake.PodEdit{created}, false},
		"ended":                                     {8, []fake.PodEdit{created, onNode, fake.Phase(corev1.PodFailed)}, false},
		"asks for no GPU memory":                    {0, []fake.PodEdit{created, onNode}, false},
		"created with nodeName":                     {8, []fake.PodEdit{withNode, onNode}, false},
		"created with nodeName, and edited by another client":                  {8, []fake.PodEdit{withNode, by("kubectl-edit", `"f:containers":{}`), onNode}, false},
		"the mirror pod of a static pod":                                       {8, []fake.PodEdit{created, onNode, fake.Mirror}, false},
		"it is not recorded who created the pod":                               {8, []fake.PodEdit{onNode, kubelet}, false},
		"the record was removed, and another client edited the pod":            {8, []fake.PodEdit{onNode, by("kubectl-edit", `"f:tolerations":{}`)}, false},
		"an unreadable record":                                                 {8, []fake.PodEdit{created, by("odd", `"f:nodeName"`), onNode}, false},
		"bound by the extender":                                                {8, []fake.PodEdit{created, onNode, annotated(protocol.Assignment{AssumeTime: at})}, false},
		"bound by the extender, and running":                                   {8, []fake.PodEdit{created, onNode, annotated(protocol.Assignment{AssumeTime: at, Assigned: true, AssignTime: later})}, false},
		"Alibaba's extender and device plugin, which rewrites the assume time": {8, []fake.PodEdit{created, onNode, annotated(protocol.Assignment{AssumeTime: later, Assigned: true})}, false},
		"a scheduler that writes another annotation":                           {8, []fake.PodEdit{created, onNode, fake.Annotation(protocol.AnnotationAllocation, `{"main":{"0":8}}`)}, false},
		"annotations that can't be read":                                       {8, []fake.PodEdit{created, onNode, fake.Annotation(protocol.AnnotationIndex, "x")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			pod := fake.Pod("p", test.memory, test.edits...)
			if got := BoundWithoutExtender(pod); got != test.want {
				t.Errorf("%v, want %v", got, test.want)
			}
		})
	}
}

func TestBypassProblem(t *testing.T) {
	for want, pods := range map[string]map[string]int{
		"": nil,
		"1 pod was bound without the extender: is default-scheduler configured to call it?":      {"default-scheduler": 1},
		"6 pods were bound without the extender: is default-scheduler configured to call it?":    {"default-scheduler": 6},
		"10 pods were bound without the extender: are a, b, c and 1 more configured to call it?": {"d": 1, "c": 2, "b": 3, "a": 4},
	} {
		if got := BypassProblem(pods); got != want {
			t.Errorf("%v: %q, want %q", pods, got, want)
		}
	}
}

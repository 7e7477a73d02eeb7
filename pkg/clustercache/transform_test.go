package clustercache

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// TestTransformNode checks that no field is lost that is read, and that large fields are.
func TestTransformNode(t *testing.T) {
	edited := func(edit func(*corev1.Node), cards ...int64) *corev1.Node {
		node := fake.Node("n1", cards...)
		edit(node)
		return node
	}
	for name, node := range map[string]*corev1.Node{
		"nothing to share":                         {},
		"an inventory":                             fake.Node("n1", 100, 200),
		"an inventory that disagrees":              edited(func(n *corev1.Node) { n.Status.Capacity = fake.Amount(protocol.ResourceMemory, 7) }, 100, 200),
		"an inventory that can't be read":          edited(func(n *corev1.Node) { n.Annotations[protocol.AnnotationInventory] = "{" }, 100, 200),
		"an existing plugin's node":                edited(func(n *corev1.Node) { n.Annotations = nil }, 100, 100),
		"whole cards beside":                       edited(func(n *corev1.Node) { n.Status.Capacity[protocol.ResourceWholeCard] = fake.Amount("x", 1)["x"] }, 100),
		"cards that NVIDIA's plugin shares beside": edited(func(n *corev1.Node) { n.Status.Capacity["nvidia.com/gpu.shared"] = fake.Amount("x", 1)["x"] }, 100),
		"a label that nothing reads":               {ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"gpu-share": "true"}}},
		"without its device plugin":                edited(func(n *corev1.Node) { n.Status.Allocatable = fake.Amount(protocol.ResourceMemory, 0) }, 100),
	} {
		t.Run(name, func(t *testing.T) {
			unread := len(node.Labels) > 0
			metav1.SetMetaDataLabel(&node.ObjectMeta, "a", "b")
			node.Spec = corev1.NodeSpec{Unschedulable: true, Taints: []corev1.Taint{{Key: "a", Effect: corev1.TaintEffectNoSchedule}}}
			node.Status.NodeInfo.KubeletVersion = "v1"
			node.Status.Conditions = []corev1.NodeCondition{
				{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue}, {Type: corev1.NodeReady, Status: corev1.ConditionUnknown},
			}
			if node.Annotations != nil {
				node.Annotations["big"] = "text"
			}
			out, err := new(sharing).transform(node)
			check.Must(t, err)
			got := out.(*corev1.Node)
			text := func(n protocol.Node) string { return fmt.Sprintf("%+v", n) }
			wantEqual(t, "parsed", text(protocol.ParseNode(node)), text(protocol.ParseNode(got)))
			if got.Annotations["big"] != "" || got.Status.NodeInfo.KubeletVersion != "" || len(got.Status.Conditions) > 1 {
				t.Errorf("it keeps fields that are never read: %v", got)
			}
			_, shares := node.Status.Capacity[protocol.ResourceMemory]
			if !shares && !unread { // Then its other fields don't matter.
				if len(got.Labels)+len(got.Spec.Taints) > 0 {
					t.Errorf("it keeps labels or taints: %v", got)
				}
				return
			}
			wantEqual(t, "labels", node.Labels, got.Labels)
			wantEqual(t, "taints", node.Spec.Taints, got.Spec.Taints)
			wantEqual(t, "allocatable", node.Status.Allocatable, got.Status.Allocatable)
			wantEqual(t, "why no pod can run there", eligibility.Closed(node, protocol.Node{}), eligibility.Closed(got, protocol.Node{}))
		})
	}
}

func TestTransformUnknownObject(t *testing.T) {
	gone := cache.DeletedFinalStateUnknown{Key: "k", Obj: fake.Pod("p", 1)}
	if out, err := new(sharing).transform(gone); err != nil || out.(cache.DeletedFinalStateUnknown).Key != "k" {
		t.Errorf("%v, %v", out, err)
	}
}

// A disruption budget with a large selector, and annotations of a namespace that nothing reads, are not kept.
func TestTransformLimits(t *testing.T) {
	s := new(sharing)
	for size, kept := range map[int]bool{10: true, protocol.MaxSize + 1: false} {
		out, _ := s.transform(fake.Budget("b", strings.Repeat("a", size), 0))
		if got := out.(*policyv1.PodDisruptionBudget).Spec.Selector != nil; got != kept {
			t.Errorf("a selector of %d bytes is kept: %v", size, got)
		}
	}
	out, _ := s.transform(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
		"note": "mine", protocol.AnnotationFairShareWeight: "2", protocol.AnnotationFairShareGuaranteed: strings.Repeat("1", 2000),
	}}})
	got := out.(*corev1.Namespace).Annotations
	if len(got) != 2 || got[protocol.AnnotationFairShareWeight] != "2" || len(got[protocol.AnnotationFairShareGuaranteed]) != protocol.MaxText {
		t.Errorf("annotations %.100v", got)
	}
}

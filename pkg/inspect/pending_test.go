package inspect

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestPendingPodDiagnosis(t *testing.T) {
	nominated := func(p *corev1.Pod) { p.Status.NominatedNodeName, p.Spec.Priority = "n2", new(int32(1)) }
	one := func(name string, cards ...gpu.Card) nodeBuilder {
		return inventoryNode(t, name, "10.0.0.1", gpu.GiB, cards...)
	}
	tests := map[string]struct {
		objects Objects
		cause   diagnosis.Reason
		text    string
	}{
		"enough free memory in total, not on one card": {
			split(t, newPod("p", 12)), diagnosis.Fragmented,
			"12 GiB free on n1, but the largest piece is 7 GiB: a pod gets one card",
		},
		"too little free memory": {
			split(t, newPod("p", 13)), diagnosis.Full,
			"the cards that are large enough are taken: the largest free piece is 7 GiB, on n1 (and 1 node alike)",
		},
		"no free memory": {
			split(t, newPod("p", 1).with(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "hdd"} })), diagnosis.Full,
			"the cards that are large enough are taken, nothing of them is free; n1: the pod's node selector or affinity rules it out",
		},
		"a card has room": {
			split(t, newPod("p", 7)), diagnosis.Fits,
			"n1 has room for it now, 7 GiB on one card: the scheduler is about to try, or needs something else than GPU memory",
		},
		"the card that is large enough is unhealthy": {
			objects([]nodeBuilder{one("n", t4(0, 8), unhealthy(t4(1, 16), "Xid 79"))}, newPod("p", 10)), diagnosis.Unhealthy,
			"the cards that are large enough are unhealthy, on n",
		},
		"free memory of unhealthy cards doesn't count": {
			objects([]nodeBuilder{one("n", t4(0, 8), unhealthy(t4(1, 16), "Xid 79"), t4(2, 16))}, newPod("p", 16), newPod("q", 15).on("n", 2)),
			diagnosis.Full, "the cards that are large enough are taken: the largest free piece is 8 GiB, on n",
		},
		"a taint with effect PreferNoSchedule": {
			objects([]nodeBuilder{one("n", t4(0, 8)).with(func(n *corev1.Node) {
				n.Spec.Taints = []corev1.Taint{{Key: "team", Effect: corev1.TaintEffectPreferNoSchedule}}
			})}, newPod("p", 9)), diagnosis.TooLarge,
			"no card is large enough: the largest has 8 GiB, on n",
		},
		"nodes that can't be used": {
			objects([]nodeBuilder{
				one("a", t4(0, 8)).with(func(n *corev1.Node) { n.Spec.Unschedulable = true }),
				one("b", t4(0, 8)).with(func(n *corev1.Node) { n.Spec.Unschedulable = true }),
				one("c", t4(0, 8)).with(func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionFalse }),
			}, newPod("p", 1)), diagnosis.NoNode,
			"no node that shares GPU memory can take the pod; 2 nodes: the node is cordoned; c: the node is not ready",
		},
		"no node shares its cards": {
			objects([]nodeBuilder{plainNode(t, "n", "10.0.0.1")}, newPod("p", 1)), diagnosis.NoNode, "no node shares GPU memory",
		},
		"a gate": {
			split(t, newPod("p", 1).with(func(p *corev1.Pod) {
				p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/quota"}, {Name: "other"}}
			})), diagnosis.Gated, "the pod is held back by its scheduling gates: example.com/quota, other",
		},
		"evictions in progress": {
			split(t, newPod("p", 16).with(nominated), newPod("e", 16).on("n2", 1).terminating()), diagnosis.Nominated,
			"pods of lower priority are leaving n2 to make room for it",
		},
		"different units are compared by their size": {
			mixed(t).plus(newPod("p", 20000)), diagnosis.TooLarge, "no card is large enough: the largest has 16 GiB, on in-gib",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			pods := Build(test.objects).PendingPods
			got := pods[slices.IndexFunc(pods, func(p PendingPod) bool { return p.Name == "p" })]
			if got.Cause != test.cause {
				t.Errorf("reason %s, want %s", got.Cause, test.cause)
			}
			if diff := cmp.Diff(test.text, got.Explanation); diff != "" {
				t.Errorf("message (-want +got):\n%s", diff)
			}
		})
	}
}

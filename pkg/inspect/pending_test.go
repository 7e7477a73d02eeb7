package inspect

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// TestPendingPodDiagnosis checks what the diagnosis gets of nodes and pods. Package diagnosis tests the texts.
func TestPendingPodDiagnosis(t *testing.T) {
	nominated := func(p *corev1.Pod) { p.Status.NominatedNodeName, p.Spec.Priority = "n2", new(int32(1)) }
	one := func(name string, cards ...gpu.Card) nodeBuilder {
		return inventoryNode(t, name, "10.0.0.1", gpu.GiB, cards...)
	}
	tests := map[string]struct {
		objects Objects
		cause   reasons.Reason
		text    string
	}{
		"enough free memory in total, not on one card": {
			split(t, newPod("p", 12)), reasons.Fragmented,
			"12 GiB free on n1, but the largest piece is 7 GiB: a pod gets one card",
		},
		"free memory of unhealthy cards doesn't count": {
			objects([]nodeBuilder{one("n", t4(0, 8), unhealthy(t4(1, 16), "Xid 79"), t4(2, 16))}, newPod("p", 16), newPod("q", 15).on("n", 2)),
			reasons.Full, "the cards that are large enough are taken: the largest free piece is 8 GiB, on n",
		},
		"nodes that can't be used": {
			objects([]nodeBuilder{
				one("a", t4(0, 8)).with(func(n *corev1.Node) { n.Spec.Unschedulable = true }),
				one("b", t4(0, 8)).with(func(n *corev1.Node) { n.Spec.Unschedulable = true }),
				one("c", t4(0, 8)).with(func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionFalse }),
			}, newPod("p", 1)), reasons.NoNode,
			"no node that shares GPU memory can take the pod; a, b: the node is cordoned; c: the node is not ready",
		},
		"a member that waits for its group, with the extender's reason": {
			split(t, newPod("p", 7).member("train", 2).created(3).refused("0/2 nodes are available: 2 gang: there is no room for all members at once."),
				newPod("q", 7).member("train", 2)), reasons.WaitsForGroup,
			"group default/train waits since 2026-07-01T11:03:00Z: there is no room for all members at once",
		},
		"a member that has not been tried, with the reason of another one": {
			split(t, newPod("p", 7).member("train", 2), newPod("q", 7).member("train", 2).refused("1 gang: there is no room for all members at once.")),
			reasons.WaitsForGroup, "group default/train waits: there is no room for all members at once",
		},
		"a member of a group about which the extender has reported nothing": {
			split(t, newPod("p", 7).member("train", 2), newPod("q", 7).member("train", 2)), reasons.WaitsForGroup,
			"group default/train waits: kube-scheduler hasn't tried all other members yet",
		},
		"a member of an incomplete group": {
			split(t, newPod("p", 7).member("train", 2)), reasons.WaitsForGroup, "group default/train waits: 1 of 2 members exist",
		},
		"a member of an incomplete group, with the gate of fair shares": {
			split(t, newPod("p", 7).member("train", 2).gated(protocol.GateFairShare)), reasons.WaitsForGroup, "group default/train waits: 1 of 2 members exist",
		},
		"a pod with the gate of fair shares that is too large": {
			split(t, newPod("p", 17).gated(protocol.GateFairShare)), reasons.TooLarge, "no card is large enough for 17 GiB: the largest has 16 GiB, on n1",
		},
		"a member of a group that runs": {
			split(t, newPod("p", 6).member("train", 2), newPod("q", 1).member("train", 2).on("n1", 0).last()), reasons.Fits,
			"n1 has room for it, 6 GiB on one card: kube-scheduler has not tried it yet",
		},
		"a member with an invalid size": {
			split(t, newPod("p", 7).member("train", 0).refused("1 gang: the group's size is not a positive integer.")), reasons.InvalidGroup,
			`group default/train is invalid: the group's size is not a positive integer up to 100000: annotation scheduling.k8s.io/group-pod-num is "0"`,
		},
		"evictions in progress": {
			split(t, newPod("p", 16).with(nominated), newPod("e", 16).on("n2", 1).terminating()), reasons.Nominated,
			"pods of lower priority are leaving n2 to make room for it",
		},
		"different units are compared by their size": {
			mixed(t).plus(newPod("p", 20000)), reasons.TooLarge, "no card is large enough for 20000 GiB: the largest has 16 GiB, on in-gib",
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			pods := Build(test.objects).PendingPods
			got := pods[slices.IndexFunc(pods, func(p PendingPod) bool { return p.Name == "p" })]
			if got.Cause != test.cause {
				t.Errorf("reason %s, want %s", got.Cause, test.cause)
			}
			check.Equal(t, "message", test.text, got.Explanation)
		})
	}
}

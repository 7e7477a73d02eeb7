package diagnosis

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// A program that knows no turns takes it from kube-scheduler's message that a pod without a gate waits for one.
func TestTurnReported(t *testing.T) {
	rejected := pod(1, condition(corev1.PodReasonUnschedulable, "0/1 nodes are available: 1 "+reasons.AwaitsTurn+". preemption: none."))
	want := Diagnosis{Reason: reasons.WaitsForTurn, Message: "the extender holds it back until its turn: kubectl inspect gpushare --shares"}
	for name, diagnoser := range map[string]*Diagnoser{
		"nodes are known": NewDiagnoser([]Node{node("a", gpu.GiB, card(0, 16, 9))}, nil, now), "pods only": PodsOnly(nil, now),
	} {
		if got := diagnoser.Diagnose(rejected, nil); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
		diagnoser.Turns = map[gpu.PodUID]reasons.Turn{} // Its turn has come since.
		if got := diagnoser.Diagnose(rejected, nil); got.Reason == reasons.WaitsForTurn {
			t.Errorf("%s, at its turn: %v", name, got)
		}
	}
}

// What kept kube-scheduler from placing a pod at its last turn is said while the pod waits for the next one.
func TestFailedAtTurn(t *testing.T) {
	diagnoser := NewDiagnoser([]Node{node("a", gpu.GiB, card(0, 16, 9))}, nil, now)
	const pause = "; it, or a pod like it, was not scheduled after its last turn, and gets the next one after a pause"
	for name, test := range map[string]struct {
		request  int64
		obstacle reasons.Obstacle
		reason   string
		message  string
		want     Diagnosis
	}{
		"a claim is missing": {
			1, reasons.ObstaclePaused, corev1.PodReasonUnschedulable, `persistentvolumeclaim "data" not found. not found`,
			Diagnosis{Reason: reasons.OtherConstraint, Message: `a has room for it, 7 GiB on one card, but scheduler "default-scheduler" rejects the pod: persistentvolumeclaim "data" not found. not found` + pause},
		},
		"nodes lack CPU": {
			1, reasons.ObstaclePaused, corev1.PodReasonUnschedulable, "0/1 nodes are available: 1 Insufficient cpu. preemption: none.",
			Diagnosis{Reason: reasons.OtherConstraint, Message: "a has room for it, 7 GiB on one card, but kube-scheduler rejects the pod: 1 Insufficient cpu" + pause},
		},
		"the bind failed": {
			1, reasons.ObstaclePaused, corev1.PodReasonSchedulerError, "binding rejected: denied by a webhook",
			Diagnosis{Reason: reasons.SchedulerError, Message: "kube-scheduler reports an error, and tries the pod again: binding rejected: denied by a webhook" + pause},
		},
		"memory was missing": {
			1, reasons.ObstaclePaused, corev1.PodReasonUnschedulable, "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.",
			Diagnosis{Reason: reasons.WaitsForTurn, Message: "waits for its turn: tenant a has 0 of its share of 4" + pause},
		},
		"nodes lacked CPU, and now memory too": {
			9, reasons.ObstacleNoRoom, corev1.PodReasonUnschedulable, "0/1 nodes are available: 1 Insufficient cpu. preemption: none.",
			Diagnosis{Reason: reasons.WaitsForTurn, Message: "waits for its turn: tenant a has 0 of its share of 4; no card has room for it now; kube-scheduler also says: 1 Insufficient cpu"},
		},
		"the extender rejects it": {
			1, reasons.ObstacleNoRoom, corev1.PodReasonUnschedulable, "0/2 nodes are available: 1 Insufficient cpu, 1 " + reasons.AwaitsTurn + ".",
			Diagnosis{Reason: reasons.WaitsForTurn, Message: "waits for its turn: tenant a has 0 of its share of 4; no card has room for it now"},
		},
	} {
		p := pod(test.request, condition(test.reason, test.message))
		diagnoser.Turns = map[gpu.PodUID]reasons.Turn{p.UID: {Tenant: "a", Share: 4, Obstacle: test.obstacle}}
		if got := diagnoser.Diagnose(p, nil); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

// What is said of a pod with the gate of fair shares, which depends on what the extender knows.
func TestTurn(t *testing.T) {
	diagnoser := NewDiagnoser([]Node{node("a", gpu.GiB, card(0, 16, 9), placement.Card{})}, nil, now)
	for name, test := range map[string]struct {
		request int64
		turn    *reasons.Turn
		wait    *GroupWait
		want    Diagnosis
	}{
		"nothing is known": {1, nil, nil, Diagnosis{Reason: reasons.Gated, Message: "the pod is held back by its scheduling gates: gpushare.aliyun.com/fair-share; " +
			"with fair sharing the extender removes gpushare.aliyun.com/fair-share at the pod's turn: kubectl inspect gpushare --shares"}},
		"nothing is known, and it never fits": {17, nil, nil, Diagnosis{Reason: reasons.TooLarge, Message: "no card is large enough for 17 GiB: the largest has 16 GiB, on a"}},
		"nothing is known, and its group is invalid": {
			1, nil, &GroupWait{Group: "default/train", Reason: reasons.GroupInvalid("the pod has a group name and no group size")},
			Diagnosis{Reason: reasons.InvalidGroup, Message: "group default/train is invalid: the pod has a group name and no group size"},
		},
		"nothing is known, and a member is missing": {
			1, nil, &GroupWait{Group: "default/train", Reason: reasons.GroupIncomplete(1, 2)},
			Diagnosis{Reason: reasons.WaitsForGroup, Message: "group default/train waits: 1 of 2 members exist"},
		},
		"its turn comes": {
			1, &reasons.Turn{Tenant: "a", Share: 2}, nil, Diagnosis{Reason: reasons.WaitsForTurn, Message: "waits for its turn: tenant a has 0 of its share of 2"},
		},
		"it never fits": {17, &reasons.Turn{Tenant: "a"}, nil, Diagnosis{Reason: reasons.TooLarge, Message: "no card is large enough for 17 GiB: the largest has 16 GiB, on a"}},
		"a member is missing": {
			1, &reasons.Turn{Obstacle: reasons.ObstacleIncomplete}, &GroupWait{Group: "default/train", Reason: reasons.GroupIncomplete(1, 2)},
			Diagnosis{Reason: reasons.WaitsForGroup, Message: "group default/train waits: 1 of 2 members exist"},
		},
		"a member is missing of a group that isn't known": {
			1, &reasons.Turn{Obstacle: reasons.ObstacleIncomplete}, nil, Diagnosis{Reason: reasons.WaitsForTurn, Message: "its group isn't complete: it gets its turn when all members exist"},
		},
	} {
		p := pod(test.request, func(pod *corev1.Pod) {
			pod.UID = "p"
			pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: protocol.GateFairShare}}
		})
		diagnoser.Turns = nil
		if test.turn != nil {
			diagnoser.Turns = map[gpu.PodUID]reasons.Turn{"p": *test.turn}
		}
		if got := diagnoser.Diagnose(p, test.wait); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

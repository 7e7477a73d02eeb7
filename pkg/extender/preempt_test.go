package extender

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"
)

type preemptArgs = extenderv1.ExtenderPreemptionArgs

func ranked(pod *corev1.Pod, priority int32) *corev1.Pod {
	pod.Spec.Priority = &priority
	return pod
}

// meta returns a node's victims by their UIDs.
func meta(node string, violations int64, uids ...string) map[string]*extenderv1.MetaVictims {
	victims := &extenderv1.MetaVictims{NumPDBViolations: violations}
	for _, uid := range uids {
		victims.Pods = append(victims.Pods, &extenderv1.MetaPod{UID: uid})
	}
	return map[string]*extenderv1.MetaVictims{node: victims}
}

// preempted sends the arguments and returns the answer's only field.
func (f *fixture) preempted(args preemptArgs) map[string]*extenderv1.MetaVictims {
	f.t.Helper()
	return answer[extenderv1.ExtenderPreemptionResult](f.t, f.post("preempt", args), 200).NodeNameToMetaVictims
}

func TestPreempt(t *testing.T) {
	a9, b7 := boundPod("a9", 9, "n1", 0), boundPod("b7", 7, "n1", 1)
	never := ranked(newPod("never", 16), 5)
	policy := corev1.PreemptNever
	never.Spec.PreemptionPolicy = &policy
	f := start(t, newNode(t, "n1", 16, 16), a9, boundPod("a7", 7, "n1", 0), boundPod("b9", 9, "n1", 1), b7,
		newNode(t, "n2", 16), ranked(boundPod("c", 16, "n2", 0), 9))
	preemptor := ranked(newPod("p", 16), 5)
	oneCard := meta("n1", 0, "uid-a7", "uid-a9")

	tests := map[string]struct {
		args preemptArgs
		want map[string]*extenderv1.MetaVictims
	}{
		"victims by UID": {preemptArgs{Pod: preemptor, NodeNameToMetaVictims: meta("n1", 1, "uid-a9", "uid-b7")}, oneCard},
		"victims as whole pods are answered by UID": {
			preemptArgs{Pod: preemptor, NodeNameToVictims: map[string]*extenderv1.Victims{"n1": {Pods: []*corev1.Pod{a9, b7}}}}, oneCard,
		},
		"no victims named, as newer schedulers may send it": {preemptArgs{Pod: preemptor, NodeNameToMetaVictims: meta("n1", 0)}, oneCard},
		"null for victims": {
			preemptArgs{Pod: preemptor, NodeNameToMetaVictims: map[string]*extenderv1.MetaVictims{"n1": nil}}, oneCard,
		},
		"null for a pod, a pod twice, a pod without UID": {
			preemptArgs{Pod: preemptor, NodeNameToMetaVictims: map[string]*extenderv1.MetaVictims{
				"n1": {Pods: []*extenderv1.MetaPod{nil, {UID: "uid-a9"}, {UID: "uid-a9"}, {}}},
			}}, oneCard,
		},
		"null for whole victims": {
			preemptArgs{Pod: preemptor, NodeNameToVictims: map[string]*extenderv1.Victims{"n1": nil}}, oneCard,
		},
		"a node where no card can be freed is dropped": {
			preemptArgs{Pod: preemptor, NodeNameToMetaVictims: meta("n2", 0, "uid-x")}, nil,
		},
		"a node that isn't known is dropped":    {preemptArgs{Pod: preemptor, NodeNameToMetaVictims: meta("n9", 0, "uid-x")}, nil},
		"no nodes":                              {preemptArgs{Pod: preemptor}, nil},
		"equal priority preempts no pod":        {preemptArgs{Pod: newPod("p", 16), NodeNameToMetaVictims: meta("n1", 0)}, nil},
		"a pod that is never to preempt":        {preemptArgs{Pod: never, NodeNameToMetaVictims: meta("n1", 0, "uid-a9")}, nil},
		"a pod that asks for no GPU memory":     {preemptArgs{Pod: newPod("p", 0), NodeNameToMetaVictims: meta("n1", 3, "uid-x")}, meta("n1", 3, "uid-x")},
		"an unknown pod is kept in":             {preemptArgs{Pod: preemptor, NodeNameToMetaVictims: meta("n1", 1, "uid-x")}, meta("n1", 1, "uid-a7", "uid-a9", "uid-x")},
		"nonsense for a number is no hindrance": {preemptArgs{Pod: preemptor, NodeNameToMetaVictims: meta("n1", -7, "uid-a9")}, oneCard},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			before := f.cluster.Ledger().Nodes()
			if diff := cmp.Diff(test.want, f.preempted(test.args), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, f.cluster.Ledger().Nodes()); diff != "" {
				t.Errorf("the ledger changed:\n%s", diff)
			}
		})
	}
}

// An empty map becomes an empty object. kube-scheduler reads null and {} alike, other clients may not.
func TestPreemptAnswersWithAMap(t *testing.T) {
	f := start(t)
	if got := f.post("preempt", preemptArgs{Pod: newPod("p", 16)}).Body.String(); got != `{"NodeNameToMetaVictims":{}}`+"\n" {
		t.Errorf("got %s", got)
	}
}

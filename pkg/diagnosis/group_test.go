package diagnosis

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// A member waits for its group, unless it can't be placed by itself however many others exist.
func TestDiagnoseMember(t *testing.T) {
	closed := node("closed", gpu.GiB, card(0, 64, 0))
	closed.Closed = "the node is cordoned"
	ill := node("ill", gpu.GiB, card(0, 40, 0))
	ill.Cards[0].Unhealthy = true
	diagnoser := NewDiagnoser([]Node{node("a", gpu.GiB, card(0, 16, 9), card(1, 16, 11)), closed, ill}, nil, now)
	wait := &GroupWait{Group: "default/train", Reason: reasons.GroupNoRoom, Since: time.Date(2026, 7, 1, 11, 0, 0, 0, time.UTC)}
	created := func(p *corev1.Pod) { p.CreationTimestamp = metav1.NewTime(now.Add(-time.Minute)) }
	const waits = "group default/train waits since 2026-07-01T11:00:00Z: there is no room for all members at once"
	for name, test := range map[string]struct {
		pod  *Pod
		wait *GroupWait
		want Diagnosis
	}{
		"alone it would fit":                                              {pod(7), wait, Diagnosis{Reason: reasons.WaitsForGroup, Message: waits}},
		"alone it would lack one card":                                    {pod(12), wait, Diagnosis{Reason: reasons.WaitsForGroup, Message: waits}},
		"alone it would lack memory":                                      {pod(13), wait, Diagnosis{Reason: reasons.WaitsForGroup, Message: waits}},
		"since when is unknown":                                           {pod(7), &GroupWait{Group: "default/train", Reason: reasons.Group{Words: "so"}}, Diagnosis{Reason: reasons.WaitsForGroup, Message: "group default/train waits: so"}},
		"no card is large enough":                                         {pod(50), wait, Diagnosis{Reason: reasons.TooLarge, Message: "no card is large enough for 50 GiB: the largest has 40 GiB, on ill; closed: the node is cordoned; " + waits}},
		"the cards that are large enough are unhealthy":                   {pod(30), wait, Diagnosis{Reason: reasons.Unhealthy, Message: "the cards that are large enough are unhealthy, on ill; closed: the node is cordoned; " + waits}},
		"no node can be used":                                             {pod(7, fake.OntoNode("x")), wait, Diagnosis{Reason: reasons.NoNode, Message: "no node that shares GPU memory can take the pod; a, closed, ill: excluded by the pod's node selector (name=x); " + waits}},
		"kube-scheduler doesn't try it for lack of memory":                {pod(13), &GroupWait{Group: "g", Reason: reasons.GroupAwaitsOthers}, Diagnosis{Reason: reasons.Full, Message: "the cards that are large enough are taken: the largest free piece is 7 GiB, on a; closed: the node is cordoned; group g waits: kube-scheduler hasn't tried all other members yet"}},
		"kube-scheduler hasn't tried it yet":                              {pod(7), &GroupWait{Group: "g", Reason: reasons.GroupAwaitsOthers}, Diagnosis{Reason: reasons.WaitsForGroup, Message: "group g waits: kube-scheduler hasn't tried all other members yet"}},
		"kube-scheduler tries no member of a PodGroup that is incomplete": {pod(7, created), &GroupWait{Group: "g", Native: true, Reason: reasons.GroupIncomplete(1, 2)}, Diagnosis{Reason: reasons.WaitsForGroup, Message: "group g waits: 1 of 2 members exist"}},
		"no scheduler tries a member of a group":                          {pod(7, created), &GroupWait{Group: "g", Reason: reasons.GroupIncomplete(1, 2)}, Diagnosis{Reason: reasons.NotTried, Message: "scheduler \"default-scheduler\" has not tried it for 1m: is a scheduler of this name running?; group g waits: 1 of 2 members exist"}},
		"its own scheduling gates come first":                             {pod(7, gated), wait, Diagnosis{Reason: reasons.Gated, Message: "the pod is held back by its scheduling gates: quota"}},
		"its own scheduling gates, and an invalid group":                  {pod(7, gated), &GroupWait{Group: "g", Reason: reasons.GroupInvalid("so")}, Diagnosis{Reason: reasons.InvalidGroup, Message: "group g is invalid: so"}},
		"it doesn't wait for its group (any more)":                        {pod(12), nil, Diagnosis{Reason: reasons.Fragmented, Message: "12 GiB free on a, but the largest piece is 7 GiB: a pod gets one card; closed: the node is cordoned"}},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 { // The second time, the pod's own diagnosis is cached.
				check.Equal(t, "the result", test.want, diagnoser.Diagnose(test.pod, test.wait))
			}
		})
	}
}

func TestReportedWait(t *testing.T) {
	for message, want := range map[string]string{
		"0/1 nodes are available: 1 gang: there is no room for all members at once.":                                                            "there is no room for all members at once",
		"0/9 nodes are available: 4 gang: 3 of 4 members exist, 5 node(s) had untolerated taint(s). preemption: 0/9 nodes are available.":       "3 of 4 members exist",
		"0/9 nodes are available: 4 Insufficient cpu, 5 gang: 3 of 4 members exist. no new claims to deallocate, preemption: not eligible.":     "3 of 4 members exist",
		"0/9 nodes are available: 4 gang: 1 of 4 members exist; not counted: 2 with an invalid group, such as b, 5 node(s) were unschedulable.": "1 of 4 members exist; not counted: 2 with an invalid group, such as b",
		"binding rejected: running Bind plugin: gang: not all members arrived in time":                                                          "not all members arrived in time",
		"0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.":                                                                           "",
		`scheduler "gang" has not tried it yet`:                                                                                                 "",
	} {
		got := ""
		if wait := ReportedWait("g", &Pod{Message: message}); wait != nil {
			got = wait.Reason.Words
		}
		if got != want {
			t.Errorf("%s: %q, want %q", message, got, want)
		}
	}
}

package scheduling

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

// A pod of higher priority takes the reserved places of a group. Its place is kept, though it isn't bound yet, until it had time to take it. Preempt names
// no member whose bind is held, and no pods of other nodes: the pod needs none of them.
func TestDisplacerKeepsPlace(t *testing.T) {
	filter := func(g *gangFixture, pod *corev1.Pod) {
		if got := g.filter(pod, "n1").Names(); len(got) != 1 {
			g.t.Errorf("the pod may go to %v, want n1", got)
		}
	}
	type victims = map[string]preemption.Victims
	elsewhere := preemption.Victims{Pods: []gpu.PodUID{"uid-v"}}
	preempt := func(proposal preemption.Victims, want victims) func(*gangFixture, *corev1.Pod) {
		return func(g *gangFixture, pod *corev1.Pod) {
			for range 2 { // kube-scheduler may ask again before the members have left its cache.
				g.preempt(pod, victims{"n1": proposal, "n2": elsewhere}, want)
			}
		}
	}
	member, other := preemption.Victims{Pods: []gpu.PodUID{"uid-job-0"}}, preemption.Victims{Pods: []gpu.PodUID{"uid-cpu"}}
	for name, test := range map[string]struct {
		priority int32
		call     func(g *gangFixture, pod *corev1.Pod)
	}{
		"in filter":  {5, filter},
		"in preempt": {5, preempt(member, nil)},
		"in preempt, victims for other resources": {5, func(g *gangFixture, pod *corev1.Pod) {
			proposed := func() victims { return victims{"n1": other, "n2": elsewhere} }
			g.preempt(pod, proposed(), nil) // It may need none once the group has given way.
			g.preempt(pod, proposed(), victims{"n1": other})
		}},
		"in preempt, and kube-scheduler rejects the node then": {5, func(g *gangFixture, pod *corev1.Pod) {
			preempt(member, nil)(g, pod)
			g.preempt(pod, victims{"n2": elsewhere}, victims{"n2": elsewhere})
		}},
		"in preempt, of equal priority": {0, preempt(member, victims{"n2": elsewhere})},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			g := startGang(t, GangOptions{}, fake.Pod("cpu", 0, fake.On("n1"), fake.CPU(8)),
				fake.Node("n2", 16), fake.Pod("v", 16, fake.Bound("n2", 0), fake.Priority(-1)))
			g.startBinds(t.Context(), 0, 1)
			g.awaitHeld(2)
			single := fake.Pod("single", 16, fake.Priority(test.priority))
			test.call(g, single)
			if test.priority == 0 {
				g.awaitHeld(2)
				return
			}
			g.wantEnds(2, reasons.GroupGaveWay)
			g.groups.tick()
			g.want(g.pods[0], "none")
			filter(g, single)
			g.pass("the group's plan", func() bool { return g.allocation("uid-job-0") != "none" })
		}))
	}
}

// preempt makes a preempt call and compares the answer.
func (g *gangFixture) preempt(pod *corev1.Pod, proposed, want map[string]preemption.Victims) {
	g.t.Helper()
	got, err := g.Preempt(g.t.Context(), pod, proposed)
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" || err != nil {
		g.t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

// A member that is more than its group needs, and whose bind is in flight, is evicted like a single pod: nothing retries a preemptor that waits for it.
func TestPreemptSurplusMember(t *testing.T) {
	bubble(func(t *testing.T) {
		surplus := member(gangSize, gangSize)
		g := startGang(t, GangOptions{}, surplus)
		g.startBinds(t.Context(), 0, 1, 2)
		g.wantEnds(3, nil)
		g.awaitState(gang.PhaseRunning)
		proposal := []gpu.PodUID{"uid-job-0", "uid-job-1", "uid-job-2", gpu.PodUID(surplus.UID)}
		got, err := g.Preempt(t.Context(), fake.Pod("single", 16, fake.Priority(5)), map[string]preemption.Victims{"n1": {Pods: proposal}})
		if err != nil || len(got["n1"].Pods) == 0 {
			t.Errorf("no victims: %v, %v", got, err)
		}
	})(t)
}

// TestLeavingPodIsForOthers: what a pod of lower priority leaves isn't kept for a member of a group that can't be placed now.
func TestLeavingPodIsForOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		low := func(name string, card int, edits ...fake.PodEdit) *corev1.Pod {
			return fake.Pod(name, 16, append(edits, fake.Bound("n1", card))...)
		}
		stays, leaves, first := low("stays", 0), low("leaves", 1, fake.Terminating(begin.Add(time.Minute))), member(gangSize, 0, fake.Priority(9))
		g := startGroups(t, GangOptions{}, stays, leaves, first)
		g.filter(first, "n1")
		if g.preemptors.VictimsSuffice(gpu.PodUID(first.UID)) {
			t.Error("the card is kept for one member of three")
		}
	})
}

package scheduling

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/fake"
)

// A pod of higher priority takes the reserved places of a group. Its place is kept, though it isn't bound yet, until it had time to take it. Preempt names
// no member whose bind is held.
func TestDisplacerKeepsPlace(t *testing.T) {
	filter := func(g *gangFixture, pod *corev1.Pod) {
		if got := g.filter(pod, "n1").Names(); len(got) != 1 {
			g.t.Errorf("the pod may go to %v, want n1", got)
		}
	}
	preempt := func(proposal, want []gpu.PodUID) func(*gangFixture, *corev1.Pod) {
		return func(g *gangFixture, pod *corev1.Pod) {
			for range 2 { // kube-scheduler may ask again before the members have left its cache.
				got, err := g.Preempt(g.t.Context(), pod, map[string]preemption.Victims{"n1": {Pods: proposal}})
				if err != nil || !slices.Equal(got["n1"].Pods, want) {
					g.t.Errorf("victims %v, want %v: %v", got["n1"].Pods, want, err)
				}
			}
		}
	}
	member, other := []gpu.PodUID{"uid-job-0"}, []gpu.PodUID{"uid-cpu"}
	for name, test := range map[string]struct {
		priority int32
		call     func(g *gangFixture, pod *corev1.Pod)
	}{
		"in filter":  {5, filter},
		"in preempt": {5, preempt(member, nil)},
		"in preempt, victims for other resources": {5, preempt(other, other)},
		"in preempt, of equal priority":           {0, preempt(member, nil)},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			g := startGang(t, GangOptions{}, fake.Pod("cpu", 0, fake.On("n1"), fake.CPU(8)))
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

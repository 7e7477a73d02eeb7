package scheduling

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// What the plan reserved is checked again before any member is bound. A group that lost a place isn't bound at all.
func TestPlanLosesPlaces(t *testing.T) {
	theirs := fake.Pod("theirs", 16)
	for name, test := range map[string]struct {
		// lose happens while two members are held.
		lose func(g *gangFixture)
		// newTerm is true if a term begins before any member is held.
		newTerm bool
	}{
		"a former leader has bound a pod to the card": {
			newTerm: true, lose: func(*gangFixture) {},
		},
		"another component binds a pod to the card": {
			lose: func(g *gangFixture) {
				g.publishObject(fake.Edited(theirs, fake.Bound("n1", 0)))
				g.want(theirs, "bound n1 card 0")
			},
		},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			g := startGang(t, GangOptions{}, theirs)
			arrived := []int{0, 1}
			if test.newTerm {
				check.Must(t, g.TakeOver(t.Context()))
				g.server.Set(fake.Edited(theirs, fake.Bound("n1", 0))) // The watch hasn't reported it.
			} else {
				g.startBinds(t.Context(), arrived...)
				g.awaitHeld(2)
				arrived = nil
			}
			test.lose(g)
			g.startBinds(t.Context(), append(arrived, 2)...)
			errs := g.awaitEnds(gangSize)
			g.wantNoCardOver()
			if bound := g.boundMembers(); len(bound) > 0 {
				t.Errorf("%v are bound; errors: %v", bound, errs)
			}
		}))
	}
}

// The answer to a bind is lost and the API server fails for longer than a bind may take. When a live read finds that pod bound, the
// last member, whose call is still held, has time left to be bound.
func TestLastMemberAfterLostAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pods, objects := members()
		g := newGangFixture(t).start(Options{BindTimeout: 2 * time.Second}, objects...) // Without replicas.
		g.pods = pods
		g.offer()
		first := make(chan struct{})
		g.server.Answer(fake.Answers{Bind: func(_ context.Context, b *corev1.Binding) error {
			if b.Name == "job-0" {
				defer close(first)
				return g.server.Commit(b)
			}
			<-first
			_ = g.server.Commit(b)
			g.server.Answer(fake.Answers{Read: errLost, Bind: func(context.Context, *corev1.Binding) error { return errLost }})
			return errLost
		}})
		g.startBinds(t.Context(), 0, 1, 2)
		g.awaitEnds(2)
		g.awaitHeld(1)
		g.server.Answer(fake.Answers{})
		g.wantEnds(1, nil)
		g.awaitState(gang.PhaseRunning)
		if n := g.marked(); n != 1 {
			t.Errorf("%d members mark the gang as whole, want one", n)
		}
	})
}

// Reserved places give way to a pod of higher priority.
func TestPlanGivesWay(t *testing.T) {
	type scene struct {
		priority int32
		// gone is true if the plan gives way, bound if the pod is then bound.
		gone, bound bool
		call        func(g *gangFixture, pod *corev1.Pod)
	}
	filter := func(want ...string) func(*gangFixture, *corev1.Pod) {
		return func(g *gangFixture, pod *corev1.Pod) {
			g.t.Helper()
			if got := g.filter(pod, "n1").Names(); !slices.Equal(got, want) {
				g.t.Errorf("the pod may go to %v, want %v", got, want)
			}
		}
	}
	filterAndBind := func(g *gangFixture, pod *corev1.Pod) {
		g.t.Helper()
		filter("n1")(g, pod)
		g.server.Set(pod)
		if err := g.bind(pod); err != nil {
			g.t.Errorf("bind: %v", err)
		}
	}
	preempt := func(proposal gpu.PodUID, want ...gpu.PodUID) func(*gangFixture, *corev1.Pod) {
		return func(g *gangFixture, pod *corev1.Pod) {
			g.t.Helper()
			for range 2 { // kube-scheduler may ask again before the members have left its cache.
				got, err := g.Preempt(g.t.Context(), pod, map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{proposal}}})
				if diff := cmp.Diff(want, got["n1"].Pods); diff != "" || err != nil {
					g.t.Errorf("victims (-want +got):\n%s, %v", diff, err)
				}
			}
		}
	}
	for name, test := range map[string]scene{
		"in filter, of higher priority":            {5, true, true, filterAndBind},
		"in filter, of higher priority, not bound": {5, true, false, filter("n1")},
		"in filter, of equal priority":             {0, false, false, filter()},
		"in preempt, of higher priority":           {5, true, false, preempt("uid-job-0")},
		"in preempt, victims for other resources":  {5, true, false, preempt("uid-cpu", "uid-cpu")},
		"in preempt, of equal priority":            {0, false, false, preempt("uid-job-0")},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			g := startGang(t, GangOptions{}, fake.Pod("cpu", 0, fake.On("n1"), fake.CPU(8)))
			g.startBinds(t.Context(), 0, 1)
			g.awaitHeld(2)
			single := fake.Pod("single", 16, fake.Priority(test.priority))
			test.call(g, single)
			if !test.gone {
				g.awaitHeld(2)
				g.want(g.pods[0], "assumed n1 card 0")
				return
			}
			g.wantEnds(2, reasons.GroupGaveWay)
			g.wantNoCardOver()
			g.want(g.pods[0], "none") // The place is kept for the pod, though it isn't bound yet.
			if got := g.filter(single, "n1").Names(); len(got) != 1 {
				t.Errorf("then the pod may go to %v", got)
			}
			if test.bound {
				g.want(single, "bound n1 card 0")
				return
			}
			g.pass("the end of the kept place", func() bool { return g.allocation(gpu.PodUID(single.UID)) == "none" })
			g.pass("the group's plan", func() bool { return g.allocation("uid-job-0") != "none" })
		}))
	}
}

// The place of a pod that displaced a group ends while a bind of the pod is in flight. It is released when that bind fails before its write.
func TestDisplacerEndsDuringBind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 10)
		g := newGangFixture(t).start(Options{}, fake.Node("n2", 16), pod)
		if _, err := g.ledger.Reserve("n2", protocol.Pod(pod), placement.Binpack, g.clock.Now()); err != nil { // As Manager.Displace does.
			t.Fatal(err)
		}
		g.ledger.Own(ledger.Displaced, "uid-p", g.clock.Now().Add(g.groups.Patience))
		claim, ok := g.binder.Claim("uid-p")
		if !ok {
			t.Fatal("a bind is in flight")
		}
		g.clock.Step(g.groups.Patience)
		g.groups.tick()
		g.want(pod, "assumed n2 card 0")
		claim.End()
		g.wantSettled(pod, "none")
		if got := g.filter(pod, "n1").Names(); len(got) != 1 {
			t.Errorf("the pod may go to %v, want the other node", got)
		}
	})
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
		if g.preemptors.TryWait(gpu.PodUID(first.UID)) {
			t.Error("the card is kept for one member of three")
		}
	})
}

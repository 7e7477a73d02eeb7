package scheduling

import (
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

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

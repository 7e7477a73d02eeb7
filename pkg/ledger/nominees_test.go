package ledger_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

func ranked(uid string, request gpu.Memory, priority int32) gpu.Pod {
	p := pod(uid, request)
	p.Priority = priority
	return p
}

func fits(l *ledger.Ledger, node string, pod gpu.Pod) (out placement.Reason) {
	l.Check(pod, []string{node}, func(_ string, reason placement.Reason) { out = reason })
	return out
}

func TestRoomIsHeldForNominatedPods(t *testing.T) {
	l := ledger.New(nil)
	l.SetNode("n1", spec(16, 16))
	l.Hold("n1", pod("a", 10), gpu.On(0, 10), at)
	l.Nominate("n1", ranked("nominee", 16, 5)) // It is to get card 1.

	for name, test := range map[string]struct {
		asks gpu.Pod
		want placement.Reason
	}{
		"the nominated pod itself":    {ranked("nominee", 16, 5), placement.Fits},
		"a lower priority":            {ranked("x", 7, 4), placement.Full},
		"an equal priority":           {ranked("x", 7, 5), placement.Full},
		"a higher priority":           {ranked("x", 7, 6), placement.Fits},
		"beside it there is room":     {ranked("x", 6, 0), placement.Fits},
		"too large for any card here": {ranked("x", 17, 0), placement.TooLarge},
	} {
		if got := fits(l, "n1", test.asks); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
		if got, reason := l.Standing("n1", test.asks); reason != test.want || len(got.Holders) != 1 {
			t.Errorf("%s: standing %v with %d holders, want %v", name, reason, len(got.Holders), test.want)
		}
	}
	if _, err := l.Reserve("n1", ranked("x", 7, 5), placement.Binpack, at); err == nil {
		t.Error("its room was given away at bind")
	}
	if got := scores(l, placement.Binpack, ranked("x", 7, 5), []string{"n1"}); got[0] != 0 {
		t.Errorf("a node without room scores %d", got[0])
	}
	// Once it holds its card, nothing is counted twice, bound or on the way there.
	nominee, err := l.Reserve("n1", ranked("nominee", 16, 5), placement.Binpack, at)
	if err != nil || nominee.Placement[0].Card != 1 {
		t.Fatalf("%+v, %v", nominee, err)
	}
	if got := fits(l, "n1", ranked("x", 6, 0)); got != placement.Fits {
		t.Errorf("beside a bound nominee: %v", got)
	}
}

func TestANominationMovesAndEnds(t *testing.T) {
	var freed []string
	l := ledger.New(func(node string) { freed = append(freed, node) })
	l.SetNode("n1", spec(16))
	l.SetNode("n2", spec(16))
	freed = nil
	asks := ranked("x", 1, 0)
	nominee := ranked("nominee", 16, 0)
	state := func() [2]placement.Reason { return [2]placement.Reason{fits(l, "n1", asks), fits(l, "n2", asks)} }
	for step, test := range []struct {
		act   func()
		want  [2]placement.Reason
		freed []string
	}{
		{func() { l.Nominate("n1", nominee) }, [2]placement.Reason{placement.Full, placement.Fits}, nil},
		{func() { l.Nominate("n1", nominee) }, [2]placement.Reason{placement.Full, placement.Fits}, nil},
		{func() { l.Nominate("n2", nominee) }, [2]placement.Reason{placement.Fits, placement.Full}, []string{"n1"}},
		{func() { l.Withdraw("somebody") }, [2]placement.Reason{placement.Fits, placement.Full}, nil},
		{func() { l.Withdraw(nominee.UID) }, [2]placement.Reason{placement.Fits, placement.Fits}, []string{"n2"}},
		{func() { l.Withdraw(nominee.UID) }, [2]placement.Reason{placement.Fits, placement.Fits}, nil},
	} {
		freed = nil
		test.act()
		if got := state(); got != test.want {
			t.Errorf("step %d: %v, want %v", step, got, test.want)
		}
		if diff := cmp.Diff(test.freed, freed); diff != "" {
			t.Errorf("step %d: freed (-want +got):\n%s", step, diff)
		}
	}
	// A node that isn't known, or no longer, keeps its nominations and nothing else.
	l.Nominate("unknown", nominee)
	if _, known := l.Node("unknown"); !known {
		t.Error("the nomination was forgotten")
	}
	if got := fits(l, "unknown", asks); got != placement.NotShared {
		t.Errorf("a node that isn't known: %v", got)
	}
	if _, reason := l.Standing("unknown", asks); reason != placement.NotShared {
		t.Errorf("a node that isn't known: %v", reason)
	}
	l.Withdraw(nominee.UID)
	if _, known := l.Node("unknown"); known {
		t.Error("something is left of the nomination")
	}
}

func TestRoomThatComesFreeBitByBitIsHeld(t *testing.T) {
	l := ledger.New(nil)
	l.SetNode("n1", spec(16, 16))
	first, second, stays := pod("first", 9), pod("second", 7), pod("stays", 16)
	l.Hold("n1", stays, gpu.On(0, 16), at)
	l.Hold("n1", first, gpu.On(1, 9), at)
	second.Leaving = true
	l.Hold("n1", second, gpu.On(1, 7), at)
	nominee, asks := ranked("nominee", 16, 5), ranked("x", 9, 0)
	l.Nominate("n1", nominee)
	l.Drop(first.UID)
	if got := fits(l, "n1", asks); got != placement.Full {
		t.Errorf("while the second is leaving: %v", got)
	}
	if got := fits(l, "n1", nominee); got != placement.Full {
		t.Errorf("the nominee itself: %v", got)
	}
	l.Drop(second.UID)
	if got := fits(l, "n1", nominee); got != placement.Fits {
		t.Errorf("the nominee, once all have gone: %v", got)
	}
	// One that nobody leaves for holds nothing back.
	l.Hold("n1", pod("third", 7), gpu.On(1, 7), at)
	if got := fits(l, "n1", asks); got != placement.Fits {
		t.Errorf("beside a nominee without a chance: %v", got)
	}
}

func TestNominateWithVictims(t *testing.T) {
	l := ledger.New(nil)
	l.SetNode("n1", spec(16))
	victim, nominee, asks := pod("victim", 9), ranked("nominee", 16, 5), ranked("x", 7, 5)
	l.Hold("n1", victim, gpu.On(0, 9), at)
	l.Nominate("n1", nominee)
	if got := fits(l, "n1", asks); got != placement.Fits {
		t.Errorf("before anything is known of victims: %v", got)
	}
	l.Nominate("n1", nominee, victim.UID)
	if got := fits(l, "n1", asks); got != placement.Full {
		t.Errorf("while the victim is about to be evicted: %v", got)
	}
	l.Nominate("n1", nominee)
	if got := fits(l, "n1", asks); got != placement.Fits {
		t.Errorf("once the eviction has failed: %v", got)
	}
}

func TestStandingCountsWhatANomineeWaitsFor(t *testing.T) {
	l := ledger.New(nil)
	l.SetNode("n1", spec(16))
	leaving := pod("a", 16)
	leaving.Leaving = true
	l.Hold("n1", leaving, gpu.On(0, 16), at)
	l.Nominate("n1", ranked("nominee", 16, 5))
	got, reason := l.Standing("n1", ranked("x", 1, 5))
	if reason != placement.Full || got.Cards[0].Used != 32 {
		t.Errorf("%v, used %d, want 32: what is there and what is to come", reason, got.Cards[0].Used)
	}
	if got, _ = l.Standing("n1", ranked("x", 1, 6)); got.Cards[0].Used != 16 {
		t.Errorf("for a higher priority: used %d", got.Cards[0].Used)
	}
	got.Holders[0].Placement[0].Memory, got.Cards[0].Used = 1, 1
	if n, _ := l.Node("n1"); n.Used[0] != 16 || n.Holders[0].Placement[0].Memory != 16 {
		t.Error("a standing isn't a copy")
	}
}

func TestStandingOfAPodThatHoldsSomething(t *testing.T) {
	l := ledger.New(nil)
	l.SetNode("n1", spec(16))
	l.SetNode("n2", spec(16))
	p := pod("a", 16)
	l.Hold("n1", p, gpu.On(0, 16), at)
	for node, want := range map[string]placement.Reason{"n1": placement.Fits, "n2": placement.Elsewhere} {
		if _, got := l.Standing(node, p); got != want {
			t.Errorf("%s: %v, want %v", node, got, want)
		}
	}
}

func TestNomineesAreServedByPriorityThenSize(t *testing.T) {
	l := ledger.New(nil)
	l.SetNode("n1", spec(16, 10))
	// Were the small one of equal priority served first, it would take the small card, where only the next fits.
	l.Nominate("n1", ranked("small", 6, 5))
	l.Nominate("n1", ranked("large", 10, 5))
	l.Nominate("n1", ranked("lowly", 16, 4))
	for name, test := range map[string]struct {
		asks gpu.Pod
		want placement.Reason
	}{
		"beside the two that both find room": {ranked("x", 10, 5), placement.Fits},
		"more than they leave":               {ranked("x", 11, 5), placement.Full},
		"the third doesn't count for it":     {ranked("x", 10, 5), placement.Fits},
		"for one like it, it finds no room":  {ranked("x", 10, 4), placement.Fits},
		"before all of them":                 {ranked("x", 16, 6), placement.Fits},
	} {
		if got := fits(l, "n1", test.asks); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

func TestOutranked(t *testing.T) {
	l := ledger.New(nil)
	for _, node := range []string{"low", "equal", "reserved", "empty"} {
		l.SetNode(node, spec(16))
	}
	l.Hold("low", ranked("a", 4, 5), gpu.On(0, 4), at)
	l.Hold("low", ranked("b", 4, 4), gpu.On(0, 4), at)
	l.Hold("equal", ranked("c", 4, 5), gpu.On(0, 4), at)
	if _, err := l.Reserve("reserved", ranked("d", 4, 4), placement.Binpack, at); err != nil {
		t.Fatal(err)
	}
	names := []string{"unknown", "reserved", "low", "equal", "empty"}
	if diff := cmp.Diff([]string{"low"}, l.Outranked(ranked("x", 16, 5), names)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

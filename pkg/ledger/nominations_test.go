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

func TestNomination(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16, 16))
	l.SetBound("n1", pod("a", 10), gpu.On(0, 10), at)
	l.Nominate("n1", ranked("nominee", 16, 5)) // It gets card 1.

	for name, test := range map[string]struct {
		asks gpu.Pod
		want placement.Reason
	}{
		"the nominated pod":         {ranked("nominee", 16, 5), placement.Fits},
		"a lower priority":          {ranked("x", 7, 4), placement.Full},
		"an equal priority":         {ranked("x", 7, 5), placement.Full},
		"a higher priority":         {ranked("x", 7, 6), placement.Fits},
		"a pod that fits beside it": {ranked("x", 6, 0), placement.Fits},
		"too large for any card":    {ranked("x", 17, 0), placement.TooLarge},
	} {
		if got := fits(l, "n1", test.asks); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
		if got, reason := l.Availability("n1", test.asks); reason != test.want || len(got.Allocations) != 1 {
			t.Errorf("%s: availability %v with %d allocations, want %v", name, reason, len(got.Allocations), test.want)
		}
	}
	if _, err := l.Reserve("n1", ranked("x", 7, 5), placement.Binpack, at); err == nil {
		t.Error("Reserve ignored the nomination")
	}
	if got := scores(l, placement.Binpack, ranked("x", 7, 5), []string{"n1"}); got[0] != 0 {
		t.Errorf("a node without room scores %d", got[0])
	}
	// Once the nominee has an allocation, its memory isn't counted twice.
	nominee, err := l.Reserve("n1", ranked("nominee", 16, 5), placement.Binpack, at)
	if err != nil || nominee.Placement[0].Card != 1 {
		t.Fatalf("%+v, %v", nominee, err)
	}
	if got := fits(l, "n1", ranked("x", 6, 0)); got != placement.Fits {
		t.Errorf("beside a nominee with an allocation: %v", got)
	}
}

func TestNominationMoves(t *testing.T) {
	var freed []string
	l := ledger.New()
	l.AddFreedListener(func(node string) { freed = append(freed, node) })
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
		{func() { l.RemoveNomination("unknown") }, [2]placement.Reason{placement.Fits, placement.Full}, nil},
		{func() { l.RemoveNomination(nominee.UID) }, [2]placement.Reason{placement.Fits, placement.Fits}, []string{"n2"}},
		{func() { l.RemoveNomination(nominee.UID) }, [2]placement.Reason{placement.Fits, placement.Fits}, nil},
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
	// A node without an object is known as long as it has a nomination.
	l.Nominate("unknown", nominee)
	if _, known := l.Node("unknown"); !known {
		t.Error("the nomination is missing")
	}
	if got := fits(l, "unknown", asks); got != placement.NotShared {
		t.Errorf("unknown node: %v", got)
	}
	if _, reason := l.Availability("unknown", asks); reason != placement.NotShared {
		t.Errorf("unknown node: %v", reason)
	}
	l.RemoveNomination(nominee.UID)
	if _, known := l.Node("unknown"); known {
		t.Error("the node is still known after the nomination's end")
	}
}

func TestNominationAccumulatesFreedMemory(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16, 16))
	first, second, stays := pod("first", 9), pod("second", 7), pod("stays", 16)
	l.SetBound("n1", stays, gpu.On(0, 16), at)
	l.SetBound("n1", first, gpu.On(1, 9), at)
	second.Leaving = true
	l.SetBound("n1", second, gpu.On(1, 7), at)
	nominee, asks := ranked("nominee", 16, 5), ranked("x", 9, 0)
	l.Nominate("n1", nominee)
	l.Remove(first.UID)
	if got := fits(l, "n1", asks); got != placement.Full {
		t.Errorf("while the second pod is terminating: %v", got)
	}
	if got := fits(l, "n1", nominee); got != placement.Full {
		t.Errorf("the nominee, while the second pod is terminating: %v", got)
	}
	l.Remove(second.UID)
	if got := fits(l, "n1", nominee); got != placement.Fits {
		t.Errorf("the nominee, after both pods have ended: %v", got)
	}
	// A nominee that doesn't fit, on a card without terminating pods, reserves nothing.
	l.SetBound("n1", pod("third", 7), gpu.On(1, 7), at)
	if got := fits(l, "n1", asks); got != placement.Fits {
		t.Errorf("beside a nominee that can't fit: %v", got)
	}
}

func TestNominateWithVictims(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16))
	victim, nominee, asks := pod("victim", 9), ranked("nominee", 16, 5), ranked("x", 7, 5)
	l.SetBound("n1", victim, gpu.On(0, 9), at)
	l.Nominate("n1", nominee)
	if got := fits(l, "n1", asks); got != placement.Fits {
		t.Errorf("without victims: %v", got)
	}
	l.Nominate("n1", nominee, victim.UID)
	if got := fits(l, "n1", asks); got != placement.Full {
		t.Errorf("with a victim before its eviction: %v", got)
	}
	l.Nominate("n1", nominee)
	if got := fits(l, "n1", asks); got != placement.Fits {
		t.Errorf("after a failed eviction: %v", got)
	}
}

func TestAvailabilityCountsNominee(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16))
	leaving := pod("a", 16)
	leaving.Leaving = true
	l.SetBound("n1", leaving, gpu.On(0, 16), at)
	l.Nominate("n1", ranked("nominee", 16, 5))
	got, reason := l.Availability("n1", ranked("x", 1, 5))
	if reason != placement.Full || got.Cards[0].Used != 32 {
		t.Errorf("%v, used %d, want 32: the terminating pod and the nominee", reason, got.Cards[0].Used)
	}
	if got, _ = l.Availability("n1", ranked("x", 1, 6)); got.Cards[0].Used != 16 {
		t.Errorf("for a higher priority: used %d", got.Cards[0].Used)
	}
	got.Allocations[0].Placement[0].Memory, got.Cards[0].Used = 1, 1
	if n, _ := l.Node("n1"); n.Used[0] != 16 || n.Allocations[0].Placement[0].Memory != 16 {
		t.Error("Availability isn't a copy")
	}
}

func TestAvailabilityOfAllocatedPod(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16))
	l.SetNode("n2", spec(16))
	p := pod("a", 16)
	l.SetBound("n1", p, gpu.On(0, 16), at)
	for node, want := range map[string]placement.Reason{"n1": placement.Fits, "n2": placement.Elsewhere} {
		if _, got := l.Availability(node, p); got != want {
			t.Errorf("%s: %v, want %v", node, got, want)
		}
	}
}

func TestNomineeOrder(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16, 10))
	// By priority, then the larger one first. With the small one of equal priority first, it would take the small card,
	// and the large one would not fit.
	l.Nominate("n1", ranked("small", 6, 5))
	l.Nominate("n1", ranked("large", 10, 5))
	l.Nominate("n1", ranked("low", 16, 4))
	for name, test := range map[string]struct {
		asks gpu.Pod
		want placement.Reason
	}{
		"what the two of higher priority leave": {ranked("x", 10, 5), placement.Fits},
		"more than they leave":                  {ranked("x", 11, 5), placement.Full},
		"the third nominee has lower priority":  {ranked("x", 10, 5), placement.Fits},
		"the third nominee fits no card":        {ranked("x", 10, 4), placement.Fits},
		"higher priority than all nominees":     {ranked("x", 16, 6), placement.Fits},
	} {
		if got := fits(l, "n1", test.asks); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
}

func TestOutranked(t *testing.T) {
	l := ledger.New()
	for _, node := range []string{"low", "equal", "reserved", "empty"} {
		l.SetNode(node, spec(16))
	}
	l.SetBound("low", ranked("a", 4, 5), gpu.On(0, 4), at)
	l.SetBound("low", ranked("b", 4, 4), gpu.On(0, 4), at)
	l.SetBound("equal", ranked("c", 4, 5), gpu.On(0, 4), at)
	if _, err := l.Reserve("reserved", ranked("d", 4, 4), placement.Binpack, at); err != nil {
		t.Fatal(err)
	}
	names := []string{"unknown", "reserved", "low", "equal", "empty"}
	if diff := cmp.Diff([]string{"low"}, l.Outranked(ranked("x", 16, 5), names)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

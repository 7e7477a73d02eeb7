package ledger_test

import (
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// TestNomination checks which pods fit a node n1 with two cards of 16 beside nominations to it.
func TestNomination(t *testing.T) {
	a, x := pod("a", 10), func(request gpu.Memory, priority int32) gpu.Pod { return pod("x", request, priority) }
	nominee := pod("nominee", 16, 5)
	nominated := func(f *fixture) {
		f.bind("n1", 0, a)
		f.Nominate("n1", nominee) // It is expected on card 1.
	}
	// 16 and 10 are free. By priority, then the larger one first: with the small one of equal priority first, it would take
	// the small card, and the large one would not fit. The last one fits no card.
	three := func(f *fixture) {
		f.SetNode("n1", spec(16, 10))
		f.Nominate("n1", pod("small", 6, 5))
		f.Nominate("n1", pod("large", 10, 5))
		f.Nominate("n1", pod("low", 16, 4))
	}
	victims := func(uids ...gpu.PodUID) func(f *fixture) {
		return func(f *fixture) {
			f.bind("n1", 0, a)
			f.bind("n1", 1, pod("other", 16))
			f.Nominate("n1", nominee, "a")
			f.Nominate("n1", nominee, uids...)
		}
	}
	freeing := func(then ...string) func(f *fixture) {
		return func(f *fixture) {
			f.bind("n1", 0, pod("stays", 16))
			f.bind("n1", 1, pod("first", 9), terminating(pod("second", 7)))
			f.Nominate("n1", nominee)
			for _, uid := range then {
				f.Remove(gpu.PodUID(uid))
			}
		}
	}
	oneCardOnly := func(f *fixture) {
		over := pod("over", 32, 5)
		over.Cards = 2
		f.Nominate("n1", over)
		changed := spec(16, 16)
		changed.SeveralCards = reasons.OneCardOnly
		f.SetNode("n1", changed)
	}
	for name, tc := range map[string]struct {
		before func(f *fixture)
		pod    gpu.Pod
		want   reasons.Reason
	}{
		"nothing is kept for a pod that the node takes no more": {oneCardOnly, x(16, 5), reasons.Fits},
		"the nominated pod":                                     {nominated, nominee, reasons.Fits},
		"a lower priority":                                      {nominated, x(7, 4), reasons.Full},
		"an equal priority":                                     {nominated, x(7, 5), reasons.Full},
		"a higher priority":                                     {nominated, x(7, 6), reasons.Fits},
		"a pod that fits beside it":                             {nominated, x(6, 0), reasons.Fits},
		"too large for any card":                                {nominated, x(17, 0), reasons.TooLarge},
		"what the two of higher priority leave":                 {three, x(10, 5), reasons.Fits},
		"more than they leave":                                  {three, x(11, 5), reasons.Full},
		"a nominee that fits no card reserves nothing":          {three, x(10, 4), reasons.Fits},
		"higher priority than all nominees":                     {three, x(16, 6), reasons.Fits},
		"the victims' memory counts before their eviction":      {victims("a"), x(6, 5), reasons.Full},
		"it doesn't after a failed eviction":                    {victims(), x(6, 5), reasons.Fits},
		"a pod has ended, another one is terminating":           {freeing("first"), x(9, 0), reasons.Full},
		"the nominee, while a pod is terminating":               {freeing("first"), nominee, reasons.Full},
		"the nominee, after both have ended":                    {freeing("first", "second"), nominee, reasons.Fits},
		"a card without enough terminating pods isn't reserved": {freeing("second"), x(7, 0), reasons.Fits},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, spec(16, 16))
			tc.before(f)
			expect(t, "ForEachFit", []reasons.Reason{tc.want}, f.check(tc.pod, "n1"))
			expect(t, "Rank", []reasons.Reason{tc.want}, f.rank(binpack, tc.pod, "n1"))
			n, _ := f.Node("n1")
			available, reason := f.Availability("n1", tc.pod, nil)
			expect(t, "Availability", []any{tc.want, len(n.Allocations)}, []any{reason, len(available.Allocations)})
			if _, err := f.Reserve("n1", tc.pod, placement.Binpack, at); (err == nil) != (tc.want == reasons.Fits) {
				t.Errorf("Reserve returns %v", err)
			}
		})
	}
}

// Once the nominee has an allocation, its memory isn't counted twice.
func TestNomineeReserved(t *testing.T) {
	f := newFixture(t, spec(16, 16))
	f.bind("n1", 0, pod("a", 10))
	f.Nominate("n1", pod("nominee", 16, 5))
	f.reserve("n1", pod("nominee", 16, 5))
	expect(t, "beside it", []reasons.Reason{reasons.Fits}, f.check(pod("x", 6), "n1"))
}

func TestNominationMoves(t *testing.T) {
	f := newFixture(t, spec(16), spec(16))
	nominee, x := pod("nominee", 16), pod("x", 1)
	const fits, full, notShared = reasons.Fits, reasons.Full, reasons.NotShared
	for _, step := range []struct {
		what  string
		do    func()
		want  []reasons.Reason // n1, n2 and an unknown node for another pod
		freed []string
	}{
		{"nominated", func() { f.Nominate("n1", nominee) }, []reasons.Reason{full, fits, notShared}, nil},
		{"nominated again", func() { f.Nominate("n1", nominee) }, []reasons.Reason{full, fits, notShared}, nil},
		{"moved", func() { f.Nominate("n2", nominee) }, []reasons.Reason{fits, full, notShared}, []string{"n1"}},
		{"of another pod", func() { f.End(ledger.Nominated, "another") }, []reasons.Reason{fits, full, notShared}, nil},
		{"removed", func() { f.End(ledger.Nominated, string(nominee.UID)) }, []reasons.Reason{fits, fits, notShared}, []string{"n2"}},
		{"removed again", func() { f.End(ledger.Nominated, string(nominee.UID)) }, []reasons.Reason{fits, fits, notShared}, nil},
		{"to an unknown node", func() { f.Nominate("unknown", nominee) }, []reasons.Reason{fits, fits, notShared}, nil},
		{"the node is added", func() { f.SetNode("unknown", spec(16)) }, []reasons.Reason{fits, fits, full}, []string{"unknown"}},
		{"and deleted", func() { f.DeleteNode("unknown") }, []reasons.Reason{fits, fits, notShared}, []string{"unknown"}},
		{"from it", func() { f.End(ledger.Nominated, string(nominee.UID)) }, []reasons.Reason{fits, fits, notShared}, []string{"unknown"}},
	} {
		step.do()
		expect(t, step.what, step.want, f.check(x, "n1", "n2", "unknown"))
		expect(t, step.what+": freed", step.freed, f.takeFreed())
		_, reason := f.Availability("unknown", x, nil)
		expect(t, step.what+": Availability", step.want[2], reason)
	}
}

func TestAvailability(t *testing.T) {
	f := newFixture(t, spec(16), spec(16))
	a := terminating(pod("a", 16))
	f.bind("n1", 0, a)
	f.Nominate("n1", pod("nominee", 16, 5))
	for name, tc := range map[string]struct {
		pod  gpu.Pod
		node string
		used gpu.Memory
		want reasons.Reason
	}{
		"the terminating pod and the nominee":      {pod("x", 1, 5), "n1", 32, reasons.Full},
		"without the nominee of lower priority":    {pod("x", 1, 6), "n1", 16, reasons.Full},
		"a pod with an allocation, on its node":    {a, "n1", 32, reasons.Fits},
		"a pod with an allocation, on another one": {a, "n2", 0, reasons.Elsewhere},
	} {
		got, reason := f.Availability(tc.node, tc.pod, nil)
		expect(t, name, []any{tc.want, tc.used}, []any{reason, got.Cards[0].Used})
	}
}

func TestOutranked(t *testing.T) {
	f := newFixture(t, spec(16), spec(16), spec(16), spec(16))
	f.bind("n1", 0, pod("a", 4, 5), pod("b", 4, 4))
	f.bind("n2", 0, pod("c", 4, 5))
	f.reserve("n3", pod("d", 4, 4))
	expect(t, "only n1 has a bound pod of lower priority", []string{"n1"}, f.NodesWithLowerPriority(pod("x", 16, 5), []string{"unknown", "n3", "n1", "n2", "n4"}))
	f.DeleteNode("n1") // It would block if NodesWithLowerPriority kept the lock.
}

// Each pod is nominated to the best node that those before it leave room on.
func TestNominateAll(t *testing.T) {
	nodes := []string{"n1", "n2", "n3"}
	for name, tc := range map[string]struct {
		before func(f *fixture)
		pods   []gpu.Pod
		// slots are those of each node.
		slots int
		want  []string
	}{
		"one beside the other":            {pods: []gpu.Pod{pod("a", 10), pod("b", 6), pod("c", 16)}, want: []string{"n1", "n1", "n2"}},
		"more than fit":                   {pods: []gpu.Pod{pod("a", 10), pod("b", 10), pod("c", 10), pod("d", 10)}, want: []string{"n1", "n2", "n3", ""}},
		"one of higher priority":          {pods: []gpu.Pod{pod("low", 16), pod("high", 16, 1)}, want: []string{"n1", "n1"}},
		"beside a preemptor's nomination": {before: func(f *fixture) { f.Nominate("n1", pod("preemptor", 16)) }, pods: []gpu.Pod{pod("a", 10)}, want: []string{"n2"}},
		"the preemptor itself":            {before: func(f *fixture) { f.Nominate("n1", pod("a", 16)) }, pods: []gpu.Pod{pod("a", 16)}, want: []string{""}},
		"a pod with an allocation":        {before: func(f *fixture) { f.reserve("n1", pod("a", 16)) }, pods: []gpu.Pod{pod("a", 16)}, want: []string{""}},
		"a pod for which a card is reserved": {
			before: func(f *fixture) {
				f.bind("n1", 0, pod("x", 16))
				f.bind("n2", 0, pod("y", 16))
				f.bind("n3", 0, pod("ends", 16))
				f.await([]ledger.Request{{Pod: pod("a", 16), Nodes: []string{"n3"}}}, 0, longAgo)
				f.Remove("ends")
			},
			pods: []gpu.Pod{pod("a", 16), pod("b", 16)}, want: []string{"n3", ""},
		},
		"one pod for each node's CPU": {
			slots: 1, pods: []gpu.Pod{pod("a", 4), pod("b", 4), pod("c", 4), pod("d", 4)}, want: []string{"n1", "n2", "n3", ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var resources ledger.Resources
			if n := tc.slots; n > 0 {
				resources = &slots{free: map[string]int{"n1": n, "n2": n, "n3": n}}
			}
			f := newFixtureWith(t, resources, spec(16), spec(16), spec(16))
			if tc.before != nil {
				tc.before(f)
			}
			requests := make([]ledger.Request, len(tc.pods))
			for i, p := range tc.pods {
				requests[i] = ledger.Request{Pod: p, Nodes: nodes}
			}
			got := f.NominateAll(requests, binpack)
			expect(t, "nodes", tc.want, got)
			for i, node := range got {
				if results := f.check(tc.pods[i], "n1", "n2", "n3"); node != "" && !slices.Contains(results, reasons.Fits) {
					t.Errorf("pod %s is nominated to %s and fits nowhere: %v", tc.pods[i], node, results)
				}
			}
		})
	}
}

// A nomination frees memory when it ends, or when it stops counting because the pod gets an allocation, and not twice.
func TestNominationEnds(t *testing.T) {
	for name, tc := range map[string]struct {
		allocated bool
		want      []string
	}{
		"the pod has no allocation": {want: []string{"n1"}},
		"the pod has one":           {allocated: true, want: []string{"n1"}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, spec(16))
			f.Nominate("n1", pod("a", 16))
			if tc.allocated {
				f.reserve("n1", pod("a", 16))
			}
			f.End(ledger.Nominated, "a")
			expect(t, "freed", tc.want, f.takeFreed())
		})
	}
}

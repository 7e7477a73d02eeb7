package ledger_test

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

func TestTentativePlacement(t *testing.T) {
	const fits, full, elsewhere = reasons.Fits, reasons.Full, reasons.Elsewhere
	type results = []reasons.Reason
	free, taken := results{fits, fits}, results{full, full}
	first := pod("first", 10)
	for name, tc := range map[string]struct {
		then func(f *fixture)
		// first and second are the reasons of n1 and n2 for the pod itself and for another pod.
		first, second results
	}{
		"added":                     {func(*fixture) {}, free, taken},
		"replaced by one node":      {func(f *fixture) { f.AddTentative(first, []string{"n2"}, at) }, free, results{fits, full}},
		"reserved":                  {func(f *fixture) { f.reserve("n1", first) }, results{fits, elsewhere}, results{full, fits}},
		"bound":                     {func(f *fixture) { f.bind("n2", 0, first) }, results{elsewhere, fits}, results{fits, full}},
		"removed":                   {func(f *fixture) { f.Remove(first.UID) }, free, free},
		"expired":                   {func(f *fixture) { f.AddTentative(pod("third", 1), nil, at.Add(time.Minute)) }, free, free},
		"the node is created again": {func(f *fixture) { f.DeleteNode("n1"); f.SetNode("n1", spec(16)) }, free, results{fits, full}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, spec(16), spec(16))
			f.AddTentative(first, []string{"n1", "n2", "unknown"}, at)
			tc.then(f)
			expect(t, "the pod itself", tc.first, f.rank(tentative, first, "n1", "n2"))
			expect(t, "another pod", tc.second, f.rank(tentative, pod("second", 10), "n1", "n2"))
			expect(t, "Check, which counts allocations only", free, f.check(pod("small", 1), "n1", "n2"))
		})
	}
}

// A reservation with a label isn't the reason for a pod of higher priority, which doesn't see it: a tentative placement takes the memory.
func TestTentativePlacementBesideReservation(t *testing.T) {
	f := newFixture(t, spec(16))
	f.await([]ledger.Request{{Pod: pod("waits", 16), Nodes: []string{"n1"}}}, 0, longAgo)
	f.AddTentative(pod("first", 10, 1), []string{"n1"}, at)
	expect(t, "a pod of higher priority", []reasons.Reason{reasons.Full}, f.rank(tentative, pod("second", 10, 1), "n1"))
	expect(t, "another pod", []reasons.Reason{reasons.Reserved}, f.rank(tentative, pod("third", 4), "n1"))
}

// A tentative placement expires even if no other is added, and Rank reports whether it counted one.
func TestTentativePlacementExpires(t *testing.T) {
	f := newFixture(t, spec(16))
	f.AddTentative(pod("first", 10), []string{"n1"}, at)
	for name, tc := range map[string]struct {
		now     time.Time
		want    reasons.Reason
		counted bool
	}{
		"a second later": {at.Add(time.Second), reasons.Full, true},
		"a minute later": {at.Add(time.Minute), reasons.Fits, false},
		"not asked for":  {time.Time{}, reasons.Fits, false},
	} {
		view := ledger.View{Card: placement.Binpack, Node: placement.Binpack, TentativeAt: tc.now}
		_, got, counted := f.Rank(view, pod("second", 10), []string{"n1"})
		expect(t, name, []reasons.Reason{tc.want}, got)
		expect(t, name+": counted", tc.counted, counted)
	}
	f.Remove("first")
	_, _, counted := f.Rank(tentative, pod("second", 10), nil)
	expect(t, "counted after the pod's removal", false, counted)
}

func TestTentativePlacementShares(t *testing.T) {
	f := newFixture(t, spec(16, 16))
	for _, name := range []string{"a", "b", "c"} {
		f.AddTentative(pod(name, 8), []string{"n1"}, at)
	}
	for request, want := range map[gpu.Memory]reasons.Reason{8: reasons.Fits, 9: reasons.Full} {
		expect(t, "beside three halves of a card", []reasons.Reason{want}, f.rank(tentative, pod("d", request), "n1"))
	}
}

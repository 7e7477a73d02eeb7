package ledger_test

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// finds returns the reasons of the nodes for the pod, with tentative placements counted.
func finds(l *ledger.Ledger, pod gpu.Pod, names ...string) []placement.Reason {
	return findsAt(l, at, pod, names...)
}

func findsAt(l *ledger.Ledger, now time.Time, pod gpu.Pod, names ...string) []placement.Reason {
	var reasons []placement.Reason
	view := ledger.View{Card: placement.Binpack, Node: placement.Binpack, TentativeAt: now}
	l.Rank(view, pod, names, func(_ int, _ placement.Suitability, r placement.Reason) { reasons = append(reasons, r) })
	return reasons
}

func TestTentativePlacement(t *testing.T) {
	free, taken := []placement.Reason{placement.Fits, placement.Fits}, []placement.Reason{placement.Full, placement.Full}
	first, second := pod("first", 10), pod("second", 10)
	for name, test := range map[string]struct {
		then  func(l *ledger.Ledger)
		first []placement.Reason
		want  []placement.Reason
	}{
		"added":                {func(*ledger.Ledger) {}, free, taken},
		"replaced by one node": {func(l *ledger.Ledger) { l.AddTentative(first, []string{"n2"}, at) }, free, []placement.Reason{placement.Fits, placement.Full}},
		"reserved": {func(l *ledger.Ledger) {
			if _, err := l.Reserve("n1", first, placement.Binpack, at); err != nil {
				t.Error(err)
			}
		}, []placement.Reason{placement.Fits, placement.Elsewhere}, []placement.Reason{placement.Full, placement.Fits}},
		"bound":   {func(l *ledger.Ledger) { l.SetBound("n2", first, gpu.On(0, 10), at) }, []placement.Reason{placement.Elsewhere, placement.Fits}, []placement.Reason{placement.Fits, placement.Full}},
		"removed": {func(l *ledger.Ledger) { l.Remove(first.UID) }, free, free},
		"expired": {func(l *ledger.Ledger) { l.AddTentative(pod("third", 1), nil, at.Add(time.Minute)) }, free, free},
		"the node is created again": {func(l *ledger.Ledger) {
			l.DeleteNode("n1")
			l.SetNode("n1", spec(16))
		}, free, []placement.Reason{placement.Fits, placement.Full}},
	} {
		t.Run(name, func(t *testing.T) {
			l := ledger.New()
			l.SetNode("n1", spec(16))
			l.SetNode("n2", spec(16))
			l.AddTentative(first, []string{"n1", "n2", "unknown"}, at)
			test.then(l)
			expect(t, "the pod itself", test.first, finds(l, first, "n1", "n2"))
			expect(t, "another pod", test.want, finds(l, second, "n1", "n2"))
			// A tentative placement allocates nothing: Check doesn't count it.
			l.Check(pod("small", 1), []string{"n1", "n2"}, func(name string, r placement.Reason) { expect(t, name, placement.Fits, r) })
		})
	}
}

// A tentative placement expires even if no other is added.
func TestTentativePlacementExpires(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16))
	l.AddTentative(pod("first", 10), []string{"n1"}, at)
	expect(t, "a second later", []placement.Reason{placement.Full}, findsAt(l, at.Add(time.Second), pod("second", 10), "n1"))
	expect(t, "a minute later", []placement.Reason{placement.Fits}, findsAt(l, at.Add(time.Minute), pod("second", 10), "n1"))
}

func TestRankReportsTentativePlacements(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16))
	rank := func(tentativeAt time.Time) bool {
		view := ledger.View{Card: placement.Binpack, Node: placement.Binpack, TentativeAt: tentativeAt}
		return l.Rank(view, pod("second", 10), []string{"n1"}, func(int, placement.Suitability, placement.Reason) {})
	}
	if rank(at) {
		t.Error("reported before the first one")
	}
	l.AddTentative(pod("first", 10), []string{"n1"}, at)
	if !rank(at.Add(time.Second)) {
		t.Error("not reported")
	}
	if rank(time.Time{}) || rank(at.Add(time.Minute)) {
		t.Error("reported although not counted")
	}
	l.Remove(pod("first", 10).UID)
	if rank(at) {
		t.Error("reported after the pod's removal")
	}
}

func TestTentativePlacementShares(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16, 16))
	for _, name := range []string{"a", "b", "c"} {
		l.AddTentative(pod(name, 8), []string{"n1"}, at)
	}
	expect(t, "half a card beside three halves", []placement.Reason{placement.Fits}, finds(l, pod("d", 8), "n1"))
	expect(t, "a whole card", []placement.Reason{placement.Full}, finds(l, pod("e", 16), "n1"))
}

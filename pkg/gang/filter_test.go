package gang

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// TestUnknownPodsBounded: filter calls for pods that don't exist must not exhaust the memory.
func TestUnknownPodsBounded(t *testing.T) {
	mgr := New(Options{})
	for i := range maxUnknown + 100 {
		mgr.filterAll(gpu.PodUID(fmt.Sprint(i)), nil, time.Unix(1, 0))
	}
	if got := len(mgr.unknownPods); got > maxUnknown {
		t.Errorf("%d unknown pods remembered, want %d at most", got, maxUnknown)
	}
	last := gpu.PodUID(fmt.Sprint(maxUnknown + 99))
	if _, ok := mgr.unknownPods[last]; !ok {
		t.Error("the last one is not remembered")
	}
}

// TestFingerprint: equal sets of candidate nodes are stored once, whatever their order.
func TestFingerprint(t *testing.T) {
	mgr := New(Options{})
	set := func(names ...string) *candidates { return mgr.intern(fingerprint(mgr.seed, names), names) }
	a := set("n1", "n2", "n3")
	if set("n3", "n1", "n2") != a {
		t.Error("the same nodes in another order are another set")
	}
	for _, names := range [][]string{{"n1", "n2"}, {"n1", "n2", "n4"}, {"n1", "n2", "n3", "n3"}, {"n1n2", "n3", ""}, nil} {
		if set(names...) == a {
			t.Errorf("%v counts as the same set", names)
		}
	}
	for i := range 2 * maxSets {
		set("n", string(rune(i)))
	}
	if len(mgr.sets) > maxSets {
		t.Errorf("%d sets are remembered", len(mgr.sets))
	}
}

// TestWholeCardsGetAllCandidates: the answer for a member that kube-scheduler places has the order of this call's
// candidates, although the same nodes were offered in another order before.
func TestWholeCardsGetAllCandidates(t *testing.T) {
	mgr := newManager(t)
	mgr.StartLeading(begin)
	for _, name := range []string{"a", "b"} {
		mgr.SetMember(newMember(name, 0, sized(2), func(m *Member) { m.Request = 0 }), begin)
	}
	mgr.filterAll("a", []string{"n1", "n2"}, begin)
	candidates := []string{"n2", "n1"}
	if got := mgr.filterAll("b", candidates, begin).Nodes; !slices.Equal(got, candidates) {
		t.Errorf("%v of %v", got, candidates)
	}
}

// TestUnclearMembers: members of several controllers aren't told that others haven't been tried: they keep the message when all have been.
func TestUnclearMembers(t *testing.T) {
	s := newFixture(t)
	mgr := s.manager
	for i, name := range []string{"job", "next"} {
		mgr.SetMember(newMember(name, i, sized(2), func(m *Member) { m.Controller = name }), s.now)
	}
	for _, name := range []gpu.PodUID{"job", "next"} {
		if got := mgr.filterAll(name, s.nodes, s.now).Reason; got != reasons.GroupUnclear {
			t.Errorf("%s: %v, want %v", name, got, reasons.GroupUnclear)
		}
	}
	if got := mgr.filterAll("job", s.nodes, s.now.Add(settle)); len(got.Nodes) == 0 {
		t.Errorf("once no more come: %v", got.Reason)
	}
}

// TestWholeCardsOneAtATime: only one group that asks for whole cards has a plan, the one that goes first.
func TestWholeCardsOneAtATime(t *testing.T) {
	mgr := newManager(t)
	mgr.StartLeading(begin)
	for i, name := range []string{"old", "young"} {
		mgr.SetMember(newMember(name, i, sized(1), func(m *Member) { m.Request, m.Gang.Name = 0, name }), begin)
	}
	for _, call := range []struct {
		uid  gpu.PodUID
		want reasons.Group
	}{{"young", reasons.Group{}}, {"old", reasons.Group{}}, {"young", reasons.GroupOlderFirst}} {
		if got := mgr.filterAll(call.uid, []string{"n"}, begin).Reason; got != call.want {
			t.Errorf("%s: %v, want %v", call.uid, got, call.want)
		}
	}
	if got := mgr.Phases(); got[PhasePlanned] != 1 || got[PhasePending] != 1 {
		t.Errorf("phases %v", got)
	}
}

// TestWholeCardsGiveWayIfNeeded: a plan of a group with whole cards doesn't end for an older group that has no room for its GPU memory.
func TestWholeCardsGiveWayIfNeeded(t *testing.T) {
	s := newFixture(t)
	s.createMany(1, "old", 2, 17, "large")
	s.createMany(1, "old", 2, 0, "whole")
	s.now = s.now.Add(time.Second)
	s.createMany(1, "young", 1, 0, "whole")
	for _, call := range []struct {
		pod  int
		want reasons.Group
	}{{2, reasons.Group{}}, {0, reasons.GroupAwaitsOthers}, {1, reasons.GroupNoRoom}} {
		if got := s.manager.filterAll(s.created[call.pod].UID, s.nodes, s.now).Reason; got != call.want {
			t.Errorf("%s: %v, want %v", s.created[call.pod].Name, got, call.want)
		}
	}
	if got := s.manager.Phases(); got[PhasePlanned] != 1 {
		t.Errorf("phases %v", got)
	}
}

// TestFilterSample: the plan uses nodes outside the sample. A member moves into the sample if that has room, and else keeps its place.
func TestFilterSample(t *testing.T) {
	for name, test := range map[string]struct {
		sample []string
		want   FilterResult
	}{
		"the place is in the sample":                   {[]string{"n2", "n0"}, FilterResult{Nodes: []string{"n0"}}},
		"a node of the sample has room":                {[]string{"n2", "n3"}, FilterResult{Nodes: []string{"n2"}}},
		"no node of the sample has room for the place": {[]string{"full"}, FilterResult{Reason: reasons.GroupOutsideSample, Outside: "n0"}},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.setNode("full", reasons.Fits, 4)
			s.createMany(2, "g", 2, 8, "a")
			all := []string{"n0", "n1", "n2", "n3"}
			if first := s.manager.Filter(s.created[0].UID, all, all, s.now); !slices.Equal(first.Nodes, []string{"n0"}) {
				t.Fatalf("the first member passes on %v", first.Nodes)
			}
			got := s.manager.Filter(s.created[1].UID, test.sample, all, s.now)
			check.Equal(t, "the result", test.want, got)
		})
	}
}

// TestExchangedPlaces: a group has all cards of two nodes, and kube-scheduler spreads its members evenly over these. The plan doesn't know that, so a
// member gets the place of a later one, but not of one that kube-scheduler has placed.
func TestExchangedPlaces(t *testing.T) {
	s := newFixture(t)
	nodes := []string{"n0", "n1"}
	s.createMany(4, "g", 4, 16, "a")
	placed := map[string]int{}
	for i, candidates := range [][]string{nodes, {"n1"}, nodes, {"n1"}} {
		got := s.manager.filterAll(s.created[i].UID, candidates, s.now)
		if len(got.Nodes) != 1 {
			t.Fatalf("member %d of candidates %v: %v", i, candidates, got.Reason)
		}
		placed[got.Nodes[0]]++
		s.arrive(s.created[i], got.Nodes[0])
	}
	check.Equal(t, "members by node", map[string]int{"n0": 2, "n1": 2}, placed)
	check.Equal(t, "phase", 1, s.manager.Phases()[PhaseBinding])

	s = newFixture(t)
	s.createMany(4, "g", 4, 16, "a")
	for i := range 2 {
		check.Equal(t, "nodes", []string{"n0"}, s.manager.filterAll(s.created[i].UID, nodes, s.now).Nodes)
	}
	check.Equal(t, "the reason", reasons.GroupUnplaced, s.manager.filterAll(s.created[2].UID, []string{"n0"}, s.now).Reason)
}

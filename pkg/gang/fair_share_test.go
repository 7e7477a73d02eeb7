package gang

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/queue"
)

// turns are the answers of fair sharing about all pods.
type turns struct{ needed, awaited bool }

func (t *turns) NeedsTurn(gpu.Pod) bool { return t.needed }

// fullCluster returns a fixture whose cards are full but one, with a group of two that needs a card each and has been offered all nodes.
func fullCluster(t *testing.T) *fixture {
	s := newFixture(t)
	s.createMany(7, "", 0, 16, "")
	for _, p := range s.created {
		s.bindSingle(p)
	}
	s.createMany(2, "job", 2, 16, "t")
	for _, p := range s.created[7:] {
		s.filter(p)
	}
	return s
}

// TestTurnAndReservation: package dispatch, and not this one, decides about a group that waits for its turn.
func TestTurnAndReservation(t *testing.T) {
	for name, test := range map[string]struct {
		before, after turns
		reserved      bool
		fits          bool
	}{
		"it needs no turn":             {turns{}, turns{}, true, false},
		"it waits for one":             {turns{true, true}, turns{true, true}, false, true},
		"it has had one":               {turns{true, false}, turns{true, false}, true, false},
		"its namespace takes part now": {turns{}, turns{true, true}, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			s := fullCluster(t)
			s.reserve()
			for _, n := range s.ledger.Nodes() { // The pods were placed after the group was created.
				for _, a := range n.Allocations {
					s.ledger.SetBound(n.Name, a.Pod, a.Placement, s.now.Add(2*time.Second))
				}
			}
			*s.turns = test.before
			for range 25 {
				s.tick()
				s.now = s.now.Add(time.Second)
			}
			*s.turns = test.after
			s.tick()
			if fits := s.fits(gpu.Pod{UID: "single", Request: 16}); s.reservations > 0 != test.reserved || fits != test.fits {
				t.Errorf("%d reservations, want some: %t; another pod fits: %v, want %v", s.reservations, test.reserved, fits, test.fits)
			}
		})
	}
}

// TestTurnAndPlan: the next Tick after memory became free makes no plan for a group whose turn it isn't, although it has been offered nodes.
func TestTurnAndPlan(t *testing.T) {
	for name, test := range map[string]struct {
		turns turns
		want  bool
	}{
		"its turn":     {turns{true, false}, true},
		"not its turn": {turns{true, true}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := fullCluster(t)
			*s.turns = test.turns
			s.delete(s.created[0])
			s.now = s.now.Add(time.Second)
			s.manager.Tick(s.now)
			if _, _, placed := s.ledger.Lookup(s.created[8].UID); placed != test.want {
				t.Errorf("it has places: %v, want %v", placed, test.want)
			}
		})
	}
}

// TestTurnAndPlaces: the plan takes over the places of fair sharing. If it finds no room on the candidate nodes, they stay.
func TestTurnAndPlaces(t *testing.T) {
	for name, test := range map[string]struct {
		offered []string
		// want are the nodes of the members.
		want    [2]string
		planned bool
	}{
		"their nodes are candidates":           {[]string{"n0", "n1", "n2", "n3"}, [2]string{"n0", "n1"}, true},
		"one of them isn't":                    {[]string{"n0", "n2"}, [2]string{"n0", "n2"}, true},
		"not all fit on the nodes that remain": {[]string{"n0", "n3"}, [2]string{"n0", "n1"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.turns.needed = true
			for i, cards := range [][]int{{0}, {0}, {0}, {0, 1}} {
				for _, card := range cards {
					s.ledger.SetBound(s.nodes[i], gpu.Pod{UID: gpu.PodUID(fmt.Sprint("runs-", i, card)), Request: 16}, gpu.On(card, 16), s.now)
				}
			}
			s.createMany(2, "job", 2, 16, "t")
			for i, p := range s.created {
				if _, err := s.ledger.Reserve(s.nodes[i], p.Pod, placement.Binpack, s.now); err != nil {
					t.Fatal(err)
				}
				s.ledger.SetSource(ledger.Granted, p.UID)
			}
			s.manager.filterAll(s.created[0].UID, test.offered, s.now)
			if planned := s.manager.Phases()[PhasePlanned] == 1; planned != test.planned {
				t.Errorf("planned: %v", planned)
			}
			var got [2]string
			for i, p := range s.created {
				got[i], _, _ = s.ledger.Lookup(p.UID)
				if s.ledger.HasSource(ledger.Granted, p.UID) == test.planned {
					t.Errorf("fair sharing has the place of member %d: %v", i, !test.planned)
				}
			}
			slices.Sort(got[:])
			if got != test.want {
				t.Errorf("the members have places on %v, want %v", got, test.want)
			}
			if !test.planned {
				return
			}
			s.advance(testPatience)
			for _, p := range s.created {
				if node, _, placed := s.ledger.Lookup(p.UID); placed {
					t.Errorf("a place on %s stays when the plan ends", node)
				}
			}
		})
	}
}

// TestGrantedAfterFailures: a group to which fair sharing has granted places, as reclaim does after evictions, uses them although others of its
// namespace failed.
func TestGrantedAfterFailures(t *testing.T) {
	for _, granted := range []bool{false, true} {
		s := newFixture(t)
		s.turns.needed = true
		s.createMany(2, "job", 2, 16, "t")
		for _, id := range []string{"first", "second", "third"} {
			s.manager.Failures.Failed(queue.Profile{Namespace: s.created[0].Namespace, ID: id, ShapeKey: id}, s.now, s.now)
		}
		for i, p := range s.created {
			if _, err := s.ledger.Reserve(s.nodes[i], p.Pod, placement.Binpack, s.now); err != nil {
				t.Fatal(err)
			} else if granted {
				s.ledger.SetSource(ledger.Granted, p.UID)
			}
		}
		s.manager.filterAll(s.created[0].UID, s.nodes, s.now)
		if planned := s.manager.Phases()[PhasePlanned] == 1; planned != granted {
			t.Errorf("granted: %v, planned: %v", granted, planned)
		}
	}
}

// TestTurnAndPriority: a group that needs a turn takes no places of another one that goes after it.
func TestTurnAndPriority(t *testing.T) {
	for name, test := range map[string]struct {
		turns turns
		takes bool
	}{
		"needs no turn": {turns{}, true},
		"needs a turn":  {turns{true, false}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			*s.turns = test.turns
			s.createMany(8, "job", 8, 16, "t")
			s.manager.filterAll(s.created[0].UID, s.nodes, s.now)
			s.create("urgent", 1, 16, "t")
			urgent := s.created[8]
			urgent.Priority = 5
			s.report(urgent)
			if got := s.manager.filterAll(urgent.UID, s.nodes, s.now); (len(got.Nodes) > 0) != test.takes {
				t.Errorf("it may go to %v: %v", got.Nodes, got.Reason)
			}
		})
	}
}

// TestTurnAndBroken: a broken group takes places of others nevertheless. Otherwise its bound members would be evicted.
func TestTurnAndBroken(t *testing.T) {
	s := newPhaseScene(t, "broken")
	s.turns.needed = true
	s.namespace = "other"
	s.createMany(7, "other", 7, 16, "t")
	s.manager.filterAll(s.created[3].UID, s.nodes, s.now)
	s.now = s.now.Add(time.Second)
	s.manager.Tick(s.now)
	if got := s.manager.Phases()[PhasePlanned]; got != 1 {
		t.Fatalf("%d groups have places", got)
	}
	s.now = s.now.Add(2 * time.Second) // The pause after the failed bind.
	s.manager.Tick(s.now)
	i := slices.IndexFunc(s.created[:3], func(p *pod) bool { return p.Node == "" })
	if got := s.manager.filterAll(s.created[i].UID, s.nodes, s.now); len(got.Nodes) == 0 {
		t.Errorf("it has no places: %v", got.Reason)
	}
}

// TestUrgentReplacement: what a run needs to be whole again goes before other pods of its tenant, unless a member was bound just before.
func TestUrgentReplacement(t *testing.T) {
	s := newFixture(t)
	s.createMany(4, "job", 4, 16, "t")
	s.settle()
	want := func(when string, alone, urgent int) {
		t.Helper()
		got := s.manager.Startable(Key{Namespace: "default", Name: "job"}, s.now)
		if len(got.Alone) != alone || len(got.Completing) != urgent {
			t.Errorf("%s, %d are placed alone, of which %d are urgent; want %d and %d", when, len(got.Alone), len(got.Completing), alone, urgent)
		}
	}
	s.now = s.now.Add(s.manager.Patience)
	s.create("job", 4, 16, "t")
	want("while all are bound", 1, 0)
	s.delete(s.created[0])
	s.create("job", 4, 16, "t")
	want("after one ended", 2, 1)
	s.advance(time.Second)
	s.try(s.created[4])
	s.bindGranted()
	s.delete(s.created[1])
	want("soon after it was replaced", 1, 0)
	s.now = s.now.Add(s.manager.Patience)
	want("later", 1, 1)
	for _, p := range s.created[2:5] {
		s.delete(p)
	}
	want("when no member is left", 0, 0)
}

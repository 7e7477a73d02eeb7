package gang

import (
	"testing"
	"time"
)

// TestFailedTakesNothing: a group that failed doesn't take the memory of another one, although it goes before that.
func TestFailedTakesNothing(t *testing.T) {
	s := newFixture(t)
	s.reserver = nil
	group := func(namespace string, priority int32) *pod {
		s.namespace = namespace
		for range 8 {
			s.create(namespace, 8, 16, "t")
			p := s.created[len(s.created)-1]
			p.Priority = priority
			s.report(p)
		}
		return s.created[len(s.created)-8]
	}
	never := group("a", 1)
	s.manager.filterAll(never.UID, s.nodes, s.now)
	s.advance(testPatience + 5*time.Second)
	slow := group("b", 0)
	s.manager.filterAll(slow.UID, s.nodes, s.now)
	s.manager.filterAll(never.UID, s.nodes, s.now)
	s.advance(time.Second)
	if node, _, _ := s.ledger.Lookup(slow.UID); node == "" {
		t.Error("the group that had not failed has lost its memory")
	}
	important := group("c", 1)
	s.manager.filterAll(important.UID, s.nodes, s.now)
	if node, _, _ := s.ledger.Lookup(important.UID); node == "" {
		t.Error("a group that had not failed doesn't take the memory")
	}
}

// TestBrokenTakesNothingOlder: what a broken group still needs isn't taken from a group that had its memory before the break.
func TestBrokenTakesNothingOlder(t *testing.T) {
	for name, older := range map[string]bool{"older": true, "younger": false} {
		t.Run(name, func(t *testing.T) {
			s := newPhaseScene(t, "binding")
			plan := func(n int) {
				s.namespace = "other"
				s.createMany(n, "other", n, 16, "t")
				s.manager.filterAll(s.created[3].UID, s.nodes, s.now)
				s.now = s.now.Add(time.Second)
				s.manager.Tick(s.now)
			}
			if older {
				plan(5)
			}
			for i, bind := range s.granted {
				s.bind(bind, i > 0)
			}
			s.granted = nil
			s.collectDecided()
			if older { // Other pods take what the failed binds have left.
				for range 2 {
					s.bindSingle(s.create("", 0, 16, ""))
				}
			} else {
				plan(7)
			}
			if got := s.manager.Phases(); got[PhasePlanned] != 1 || got[PhaseBroken] != 1 {
				t.Fatalf("%v", got)
			}
			s.now = s.now.Add(2 * time.Second) // The pause after the failed bind.
			for _, p := range s.created[:3] {
				if p.Node == "" {
					s.manager.filterAll(p.UID, s.nodes, s.now)
				}
			}
			if took := s.manager.Phases()[PhaseBroken] == 0; took == older {
				t.Errorf("it takes the memory: %v", took)
			}
		})
	}
}

package gang

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// runBesideSingles creates an endless sequence of single pods of half a card, each of which runs for a minute, and a
// gang that needs six whole cards of eight. It returns how long the gang waited, and whether it ran.
func runBesideSingles(t *testing.T, starvationAfter time.Duration) (waited time.Duration, ran bool) {
	s := newFixture(t)
	s.manager.StarvationAfter = starvationAfter
	start := s.now
	ends := map[*pod]time.Time{}
	for i := range 16 {
		s.create("", 0, 8, "")
		s.scheduleOne() // So that their starts and ends are spread.
		ends[s.created[len(s.created)-1]] = s.now.Add(time.Duration(10+4*i) * time.Second)
	}
	s.createMany(6, "big", 6, 16, "t")
	for s.now.Before(start.Add(15 * time.Minute)) {
		queued := 0
		for _, p := range s.existing() {
			switch {
			case p.Gang.Name != "":
			case p.Node == "":
				queued++
			case ends[p].IsZero():
				ends[p] = s.now.Add(time.Minute)
			case s.now.After(ends[p]):
				s.delete(p)
			}
		}
		for ; queued < 8; queued++ {
			s.create("", 0, 8, "")
		}
		for _, p := range s.created {
			p.queued = p.Node == "" && !s.inBind(p)
		}
		for range 40 {
			s.scheduleOne()
			s.performEffects()
		}
		s.bindGranted()
		s.advance(500 * time.Millisecond)
		if s.memberCounts()["big"][0] == 6 {
			return s.now.Sub(start), true
		}
	}
	return 0, false
}

func TestStarvation(t *testing.T) {
	// Reservations last 20 s, 40 s and 80 s, with pauses as long as the previous one. The third is longer than a pod
	// runs.
	const bound = (20 + 2*20 + 2*40 + 80) * time.Second
	waited, ran := runBesideSingles(t, 20*time.Second)
	if !ran || waited > bound {
		t.Errorf("gang ran: %t, after %v; want within %v", ran, waited, bound)
	}
	t.Logf("the gang ran after %v", waited)
	if waited, ran := runBesideSingles(t, 0); ran {
		t.Errorf("it ran after %v without starvation reservations: the test shows nothing", waited)
	}
}

// TestFruitlessReservation: a group whose starvation reservation ended without a plan goes behind the others.
func TestFruitlessReservation(t *testing.T) {
	s := newFixture(t)
	s.createMany(8, "", 0, 16, "")
	for _, p := range s.created {
		s.scheduleSingle(p, s.nodes)
	}
	for i, name := range []string{"first", "second"} {
		s.createMany(4, name, 4, 16, "t")
		for _, p := range s.created[8+4*i:] {
			p.ShortOfMemory = true
			s.report(p)
		}
	}
	owner := func() string { // The group that sees the reserved memory as free.
		for _, p := range s.created[8:] {
			if s.fits(p.Pod) {
				return p.Gang.Name
			}
		}
		return ""
	}
	s.advance(s.manager.StarvationAfter + time.Second)
	for _, want := range []string{"first", "second"} {
		if s.reservations == 0 {
			t.Fatal("no reservation")
		}
		single := s.created[0]
		s.created = s.created[1:]
		s.delete(single)
		if got := owner(); got != want {
			t.Errorf("memory is reserved for %q, want %q", got, want)
		}
		s.create("", 0, 16, "")
		last := s.created[len(s.created)-1]
		s.created = append([]*pod{last}, s.created[:len(s.created)-1]...)
		before := s.reservations
		for s.reservations == before {
			s.advance(time.Second)
			if last.Node == "" {
				s.scheduleSingle(last, s.fitting(last, s.nodes))
			}
		}
	}
}

// A starvation reservation ends at once when a node that it needs takes its pods no more.
func TestStarvationReservationUnusable(t *testing.T) {
	for name, change := range map[string]func(s *fixture){
		"the node takes one card for each pod": func(s *fixture) { s.setNode(s.nodes[0], reasons.OneCardOnly, 16, 16) },
		"a card is smaller":                    func(s *fixture) { s.setNode(s.nodes[0], reasons.Fits, 16, 15) },
		"a card is gone":                       func(s *fixture) { s.setNode(s.nodes[0], reasons.Fits, 16) },
		"the node is gone":                     func(s *fixture) { s.ledger.DeleteNode(s.nodes[0]) },
		"nothing that matters":                 nil,
	} {
		s := newFixture(t)
		s.createMany(8, "", 0, 16, "")
		for _, p := range s.created {
			s.scheduleSingle(p, s.nodes)
		}
		s.createMany(4, "big", 4, 32, "t")
		for _, p := range s.created[8:] {
			p.ShortOfMemory, p.Cards = true, 2
			s.report(p)
		}
		s.advance(s.manager.StarvationAfter + time.Second)
		if s.ledger.StarvationLabel() == "" {
			t.Fatal("no reservation")
		}
		if change != nil {
			change(s)
		}
		s.manager.NodesChanged()
		s.advance(100 * time.Millisecond)
		if ended := s.ledger.StarvationLabel() == ""; ended != (change != nil) {
			t.Errorf("%s: the reservation has ended: %v", name, ended)
		}
	}
}

// TestStarvationReservationPause: a reservation ends with the plan that it made possible. If that plan fails, the next
// reservation must wait for as long as this one lasted.
func TestStarvationReservationPause(t *testing.T) {
	s := newFixture(t)
	s.create("", 0, 16, "")
	single := s.created[0]
	s.scheduleOne()
	s.performEffects()
	s.createMany(8, "big", 8, 16, "t")
	for range 20 { // They are filtered, and rejected.
		s.scheduleOne()
	}
	s.advance(s.manager.StarvationAfter + time.Second)
	if s.reservations != 1 {
		t.Fatalf("%d reservations, want 1", s.reservations)
	}
	s.advance(4 * time.Second)
	s.delete(single)
	s.advance(200 * time.Millisecond)
	if got := s.manager.Phases()[PhasePlanned]; got != 1 {
		t.Fatalf("the gang has no plan: %v", s.manager.Phases())
	}
	// A node is gone for a moment, and a single pod takes a card.
	s.ledger.DeleteNode(s.nodes[0])
	s.manager.NodesChanged()
	s.advance(100 * time.Millisecond)
	s.addNode(s.nodes[0])
	s.create("", 0, 16, "")
	s.scheduleSingle(s.created[len(s.created)-1], s.nodes)
	for range 20 {
		s.scheduleOne()
	}
	s.advance(3 * time.Second)
	if s.reservations != 1 {
		t.Errorf("memory is reserved again %v after a reservation that lasted longer", 3*time.Second)
	}
	s.advance(3 * time.Second)
	if s.reservations != 2 {
		t.Errorf("%d reservations in the end, want 2", s.reservations)
	}
}

package gang

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestSizeChange changes the size while binds are held.
func TestSizeChange(t *testing.T) {
	for name, tc := range map[string]struct {
		cards, size, members, bound int
	}{
		"one more, without room": {cards: 3, size: 4, members: 4, bound: 0},
		"one more, with room":    {cards: 4, size: 4, members: 4, bound: 4},
		"one more, not created":  {cards: 4, size: 4, members: 3, bound: 0},
		"one less":               {cards: 3, size: 2, members: 3, bound: 3},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.createMany(8-tc.cards, "others", 8-tc.cards, 16, "t")
			s.settle()
			s.createMany(3, "job", 3, 16, "t")
			mine := s.existing()[8-tc.cards:]
			s.try(mine[0])
			s.try(mine[1])
			if len(s.held) != 2 {
				t.Fatalf("%d binds are held, want 2", len(s.held))
			}
			s.createMany(tc.members-3, "job", tc.size, 16, "t")
			for _, p := range s.existing() {
				if p.Gang.Name == "job" {
					p.Size = tc.size
					s.report(p)
				}
			}
			s.settle()
			if got := s.memberCounts()["job"][0]; got != tc.bound {
				t.Errorf("%d members bound, want %d", got, tc.bound)
			}
		})
	}
}

// TestCompleteWithoutNewMember: the members agree on the size, or become enough, by a deletion or an edit. No new
// member requeues them.
func TestCompleteWithoutNewMember(t *testing.T) {
	for name, change := range map[string]func(s *fixture, old []*pod){
		"members of another size are created before the old ones are deleted": func(s *fixture, old []*pod) {
			s.createMany(4, "job", 4, 16, "t")
			s.tryAll()
			s.requeued = false
			for _, p := range old {
				s.delete(p)
				s.advance(time.Second)
			}
		},
		"the size is edited": func(s *fixture, old []*pod) {
			for _, p := range old {
				p.Size, s.requeued = 4, false
				s.report(p)
				s.try(p)
				s.collectEffects()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			for i := range 4 {
				s.create("job", 8, 16, fmt.Sprint("t", i))
			}
			s.tryAll()
			change(s, s.existing())
			if !s.requeued {
				t.Error("the members aren't requeued")
			}
			s.settle()
			if got := s.memberCounts()["job"]; got != [2]int{4, 0} {
				t.Errorf("bound and pending: %v, want 4 and 0", got)
			}
		})
	}
}

// TestRequeueRejected: members that were rejected during a back-off, or by another replica, are requeued afterwards,
// even if no plan is made at that moment.
func TestRequeueRejected(t *testing.T) {
	start := func(t *testing.T) *fixture {
		s := newFixture(t)
		s.createMany(9, "never", 9, 16, "t") // One more than there are cards.
		s.tryAll()
		s.advance(3 * time.Second) // Creation times are in whole seconds.
		return s
	}
	t.Run("after a back-off, while memory is freed", func(t *testing.T) {
		s := start(t)
		s.createMany(2, "small", 2, 16, "t")
		s.tryAll()
		s.tryAll()
		if len(s.granted) != 1 {
			t.Fatalf("%d binds are granted, want 1", len(s.granted))
		}
		s.bind(s.granted[0], true)
		s.granted = nil
		s.tryAll() // The back-off has begun.
		s.requeued = false
		s.advance(1800 * time.Millisecond)
		if s.requeued {
			t.Fatal("requeued before the back-off was over")
		}
		s.manager.MemoryFreed() // The gang that goes first waits for more freed memory.
		s.advance(time.Second)
		if !s.requeued {
			t.Error("not requeued")
		}
	})
	t.Run("when the extender becomes the leader again", func(t *testing.T) {
		s := start(t)
		s.manager.MemoryFreed()
		s.advance(time.Second) // No room was found just now.
		s.manager.StopLeading(s.now)
		s.manager.StartLeading(s.now)
		s.requeued = false
		s.advance(time.Second)
		if !s.requeued {
			t.Error("not requeued")
		}
	})
}

// TestEventIncomplete: a gang whose missing members are never created gets one Event, such as that of a StatefulSet
// that creates its next pod only when the previous one is ready.
func TestEventIncomplete(t *testing.T) {
	incompleteEvents := func(s *fixture) (n int) {
		for _, event := range s.events {
			if strings.HasPrefix(event, EventIncomplete+": The group waits: ") {
				n++
			}
		}
		return n
	}
	s := newFixture(t)
	s.create("web", 3, 16, "t")
	s.settle()
	if n := incompleteEvents(s); n != 1 || !slices.ContainsFunc(s.events, func(s string) bool { return strings.Contains(s, "1 of 3 members exist; all must be created") }) {
		t.Errorf("events: %q", s.events)
	}
	s.create("web", 3, 16, "t")
	s.advance(testPatience / 2)
	s.create("web", 3, 16, "t")
	s.settle()
	if n := incompleteEvents(s); n != 1 || s.memberCounts()["web"][0] != 3 {
		t.Errorf("events: %q; bound and pending: %v", s.events, s.memberCounts())
	}
	// The remaining running members don't wait for the deleted one.
	for _, p := range s.existing()[:1] {
		s.delete(p)
	}
	s.settle()
	if n := incompleteEvents(s); n != 1 {
		t.Errorf("events: %q", s.events)
	}
}

// TestEventIneligibleMembers: members that exist but can't be placed don't count. The Event must not ask to create
// more.
func TestEventIneligibleMembers(t *testing.T) {
	for name, tc := range map[string]struct {
		disable, enable func(*pod)
		cardless        bool
	}{
		"scheduling gates": {
			disable: func(p *pod) { p.GatedOtherwise = true }, enable: func(p *pod) { p.GatedOtherwise = false },
		},
		"invalid size": {
			disable: func(p *pod) { p.Problem, p.Size = "x is no number", 0 }, enable: func(p *pod) { p.Problem, p.Size = "", 3 },
		},
		"scheduling gates, and a member without cards": {
			disable: func(p *pod) { p.GatedOtherwise = true }, enable: func(p *pod) { p.GatedOtherwise = false }, cardless: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			if tc.cardless {
				s.createCardless("job", 3)
			}
			s.createMany(3, "job", 3, 16, "t")
			ineligible := s.existing()[2]
			tc.disable(ineligible)
			s.report(ineligible)
			s.settle()
			want := []string{EventIncomplete + ": The group waits: 2 of 3 members exist; not counted: 1 with scheduling gates or an invalid group, such as " + ineligible.Name}
			if events := slices.DeleteFunc(s.events, func(s string) bool { return !strings.HasPrefix(s, EventIncomplete) }); !slices.Equal(events, want) {
				t.Errorf("events: %q", events)
			}
			tc.enable(ineligible)
			s.report(ineligible)
			s.settle()
			if n := s.memberCounts()["job"][0]; n != 3 {
				t.Errorf("%d members bound, want 3", n)
			}
		})
	}
}

// TestEventCardlessMembers: if the missing members exist but ask for no cards, there is one Event about it and no
// other.
func TestEventCardlessMembers(t *testing.T) {
	s := newFixture(t)
	s.create("mpi", 2, 16, "t")
	s.createCardless("mpi", 2)
	s.tryAll()
	s.advance(10 * testPatience)
	s.tryAll()
	if len(s.events) != 1 || !strings.Contains(s.events[0], "1 that ask for no cards") {
		t.Errorf("events: %q", s.events)
	}
}

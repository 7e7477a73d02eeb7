package gang

import (
	"fmt"
	"testing"
	"time"
)

// stream keeps the cluster of a fixture full: with equal items, each of which runs for a while, and of which some always wait.
type stream struct {
	*fixture
	// size is that of the items: 0 for single pods.
	size  int
	lasts time.Duration
	ends  map[*pod]time.Time
}

// runBeside creates an endless stream of items, each of which runs for a minute, and a group that needs six whole cards of eight. It returns how
// long the group waited, and whether it ran.
func runBeside(t *testing.T, size int, reserves bool) (waited time.Duration, ran bool) {
	s := stream{newFixture(t), size, time.Minute, map[*pod]time.Time{}}
	if !reserves {
		s.awaited = nil
	}
	for range 40 {
		s.step(8)
	}
	start := s.now
	s.createMany(6, "big", 6, 16, "t")
	for s.now.Before(start.Add(30 * time.Minute)) {
		if s.step(8); s.memberCounts()["big"][0] == 6 {
			return s.now.Sub(start), true
		}
	}
	return 0, false
}

// step lets half a second pass. Afterwards the given number of items wait.
func (s *stream) step(waiting int) {
	queued := 0
	for _, p := range s.existing() {
		switch {
		case p.Gang.Name == "big":
		case p.Node == "":
			queued++
		case s.ends[p].IsZero():
			s.ends[p] = s.now.Add(s.lasts + time.Duration(s.random.Int64N(int64(s.lasts))))
		case s.now.After(s.ends[p]):
			s.delete(p)
		}
	}
	for queued < waiting*max(s.size, 1) {
		if s.size == 0 {
			s.create("", 0, 8, "")
			queued++
			continue
		}
		s.createMany(s.size, fmt.Sprint("small", s.serial), s.size, 8, "u")
		queued += s.size
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
}

// TestLargeGroupRuns: a large group runs beside an endless stream of single pods, or of small groups. Items run for two minutes at most, so the
// cards of a choice are free after two.
func TestLargeGroupRuns(t *testing.T) {
	const bound = 8 * time.Minute
	for name, size := range map[string]int{"single pods": 0, "groups of two": 2} {
		t.Run(name, func(t *testing.T) {
			waited, ran := runBeside(t, size, true)
			if !ran || waited > bound {
				t.Errorf("the group ran: %t, after %v; want within %v", ran, waited, bound)
			}
			t.Logf("the group ran after %v", waited)
			if waited, ran := runBeside(t, size, false); ran {
				t.Errorf("it ran after %v without reservations: the test shows nothing", waited)
			}
		})
	}
}

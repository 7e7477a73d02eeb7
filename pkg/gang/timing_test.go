package gang

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// slowScheduler runs a scheduler that handles perSecond pods a second, fewer than there are: a rejected pod returns to
// the end of the queue. It returns a function that runs a tenth of a second.
func (s *fixture) slowScheduler(perSecond int) (tenth func()) {
	var queue []*pod
	return func() {
		for _, p := range s.existing() {
			if p.Node == "" && !s.inBind(p) && !slices.Contains(queue, p) {
				queue = append(queue, p)
			}
		}
		for range min(perSecond/10, len(queue)) {
			p := queue[0]
			queue = queue[1:]
			if s.pods[p.UID] == p {
				s.schedule(p)
			}
		}
		s.collectDecided()
		s.bindGranted()
		s.advance(100 * time.Millisecond)
	}
}

// TestSlowScheduler: the scheduler needs longer than Hold for all pending pods. Without countermeasures, members that
// timed out and members that were late would alternate without end.
func TestSlowScheduler(t *testing.T) {
	for _, perSecond := range []int{100, 40, 20, 10} {
		t.Run(fmt.Sprintf("%d pods a second", perSecond), func(t *testing.T) {
			s := newFixture(t)
			s.awaited = nil
			// Four gangs that fit, and one that never does but is tried each time.
			for range 30 {
				for i := range 4 {
					s.create(fmt.Sprint("fits", i), 30, 1, "small")
				}
				s.createMany(6, "huge", 180, 16, "large")
			}
			s.random.Shuffle(len(s.created), func(i, j int) { s.created[i], s.created[j] = s.created[j], s.created[i] })
			tenth := s.slowScheduler(perSecond)
			start := s.now
			whole := func() (n int) {
				for name, count := range s.memberCounts() {
					if count[0] == 30 && name != "huge" {
						n++
					}
				}
				return n
			}
			for whole() < 4 && s.now.Sub(start) < 6*time.Minute {
				tenth()
			}
			t.Logf("%d of 4 gangs after %v: %v, %v", whole(), s.now.Sub(start), s.memberCounts(), s.failures)
			if whole() < 4 {
				t.Error("not all gangs that fit were bound")
			}
		})
	}
}

// TestFreedInPieces: the pods of a gang that ends terminate one by one. Their memory must not go to a small gang first,
// which would have to give way once it is enough for the large gang ahead of it.
func TestFreedInPieces(t *testing.T) {
	s := newFixture(t)
	s.awaited = nil
	tenth := s.slowScheduler(100)
	wait := func(what string, seconds int, condition func(members map[string][2]int) bool) {
		t.Helper()
		for range 10 * seconds {
			tenth()
			if condition(s.memberCounts()) {
				return
			}
		}
		t.Fatalf("timed out waiting until %s: %v, %v", what, s.memberCounts(), s.failures)
	}
	s.manager.MemoryFreed() // Memory that was freed a minute ago belongs to no present burst.
	s.advance(time.Minute)
	s.createMany(8, "runs", 8, 16, "t")
	wait("the first gang runs", 10, func(members map[string][2]int) bool { return members["runs"][0] == 8 })
	s.createMany(9, "never", 9, 16, "t") // One more than there are cards: the gangs behind it run nevertheless.
	s.createMany(7, "large", 7, 16, "t")
	s.advance(2 * time.Second) // Creation times are in whole seconds.
	for i := range 6 {
		s.create(fmt.Sprint("small", i/2), 2, 16, "t")
	}
	for range 50 {
		tenth()
	}
	for _, p := range s.existing() {
		if p.Gang.Name == "runs" {
			s.delete(p)
			tenth()
		}
	}
	wait("the large gang runs", 10, func(members map[string][2]int) bool { return members["large"][0] == 7 })
	if n := s.failures["gave_way"]; n > 0 {
		t.Errorf("%d plans had to give way", n)
	}
}

// TestFreedContinuously: while memory is freed without a pause, a small gang waits for a large gang ahead of it, which
// finds no room, for a second and not longer, at any rate of frees and of ticks.
func TestFreedContinuously(t *testing.T) {
	for _, tc := range []struct{ free, tick time.Duration }{
		{free: 50 * time.Millisecond, tick: 100 * time.Millisecond},
		{free: 220 * time.Millisecond, tick: 100 * time.Millisecond},
		{free: 300 * time.Millisecond, tick: 100 * time.Millisecond},
		{free: 50 * time.Millisecond, tick: 400 * time.Millisecond}, // As on a busy machine.
	} {
		t.Run(fmt.Sprintf("freed every %v, tick every %v", tc.free, tc.tick), func(t *testing.T) {
			s := newFixture(t)
			var free, tick time.Time
			instant := func() {
				s.now = s.now.Add(10 * time.Millisecond)
				if s.now.Sub(free) >= tc.free {
					free = s.now
					s.manager.MemoryFreed()
				}
				if s.now.Sub(tick) >= tc.tick {
					tick = s.now
					s.manager.Tick(s.now)
				}
				s.scheduleAll()
			}
			s.createMany(9, "never", 9, 16, "t") // One more than there are cards.
			for range 300 {
				instant()
			}
			s.createMany(2, "small", 2, 16, "t")
			begun := s.now
			for len(s.granted) == 0 && s.now.Sub(begun) < time.Minute {
				instant()
			}
			if took := s.now.Sub(begun); took > 1500*time.Millisecond { // settle and a tick.
				t.Errorf("it waited for %v", took)
			}
		})
	}
}

package gang

import (
	"fmt"
	"testing"
	"time"
)

// TestFreedInPieces: the pods of a gang that ends terminate one by one. Their memory must not go to a small gang first,
// which would have to give way once it is enough for the large gang ahead of it.
func TestFreedInPieces(t *testing.T) {
	s := newFixture(t)
	tenth := func() {
		s.tryAll()
		s.bindGranted()
		s.advance(100 * time.Millisecond)
	}
	wait := func(group string, members int) {
		t.Helper()
		for range 100 {
			if tenth(); s.memberCounts()[group][0] == members {
				return
			}
		}
		t.Fatalf("%s doesn't run: %v, %v", group, s.memberCounts(), s.failures)
	}
	s.manager.MemoryFreed() // Memory that was freed a minute ago belongs to no present burst.
	s.advance(time.Minute)
	s.createMany(8, "runs", 8, 16, "t")
	wait("runs", 8)
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
	wait("large", 7)
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
				s.tryAll()
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

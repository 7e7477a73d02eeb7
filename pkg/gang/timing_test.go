package gang_test

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// line is how kube-scheduler takes pods when it has more to do than it gets through: whoever was refused comes again, behind
// all who have waited for longer.
func (w *world) line(perSecond int) (tenth func()) {
	var line []*pod
	return func() {
		for _, p := range w.sorted() {
			if p.Node == "" && !w.flies(p) && !slices.Contains(line, p) {
				line = append(line, p)
			}
		}
		for range min(perSecond/10, len(line)) {
			p := line[0]
			line = line[1:]
			if w.pods[p.UID] == p {
				w.look(p)
			}
		}
		w.settleHeld()
		for len(w.released) > 0 {
			c := w.released[0]
			w.released = w.released[1:]
			w.bind(c, false)
		}
		w.pass(100 * time.Millisecond)
		w.check()
	}
}

// Where kube-scheduler needs longer than a bind waits to go once through all who wait, members come in turns of those who were
// sent back and those who weren't there yet. They come together all the same.
func TestASlowScheduler(t *testing.T) {
	for _, perSecond := range []int{100, 40, 20, 10} {
		t.Run(fmt.Sprintf("%d pods in a second", perSecond), func(t *testing.T) {
			w := newWorld(t, 1)
			w.claimAfter = 0
			w.restart()
			// Four groups that fit, and one that never will but is looked at each time.
			for range 30 {
				for group := range 4 {
					w.create(fmt.Sprint("fits", group), 30, 1, "small")
				}
				for range 6 {
					w.create("huge", 180, 16, "large")
				}
			}
			w.random.Shuffle(len(w.order), func(i, j int) { w.order[i], w.order[j] = w.order[j], w.order[i] })
			tenth := w.line(perSecond)
			start := w.now
			whole := func() (n int) {
				for name, count := range w.groups() {
					if count[0] == 30 && name != "huge" {
						n++
					}
				}
				return n
			}
			for whole() < 4 && w.now.Sub(start) < 6*time.Minute {
				tenth()
			}
			t.Logf("%d of 4 groups after %v: %v, %v", whole(), w.now.Sub(start), w.groups(), w.failed)
			if whole() < 4 {
				t.Error("they don't come together")
			}
		})
	}
}

// A group that ends leaves pod by pod. What it leaves isn't handed to a small group first, to be taken away again when there is
// enough for the large one that goes before it.
func TestMemoryThatComesFreeInPiecesGoesToTheFirstGroup(t *testing.T) {
	w := newWorld(t, 1)
	w.claimAfter = 0
	w.restart()
	tenth := w.line(100)
	wait := func(what string, seconds int, condition func(groups map[string][2]int) bool) {
		t.Helper()
		for range 10 * seconds {
			tenth()
			if condition(w.groups()) {
				return
			}
		}
		t.Fatalf("waited in vain until %s: %v, %v", what, w.groups(), w.failed)
	}
	w.book.Freed() // What came free a minute ago has nothing to do with what comes free now.
	w.pass(time.Minute)
	for range 8 {
		w.create("runs", 8, 16, "t")
	}
	wait("the first group runs", 10, func(groups map[string][2]int) bool { return groups["runs"][0] == 8 })
	for range 9 { // One more than there are cards: those behind it go on all the same.
		w.create("never", 9, 16, "t")
	}
	for range 7 {
		w.create("large", 7, 16, "t")
	}
	w.pass(2 * time.Second) // Ages are in whole seconds.
	for i := range 6 {
		w.create(fmt.Sprint("small", i/2), 2, 16, "t")
	}
	for range 50 {
		tenth()
	}
	for _, p := range w.sorted() {
		if p.Group.Name == "runs" {
			w.delete(p)
			tenth()
		}
	}
	wait("the large group runs", 10, func(groups map[string][2]int) bool { return groups["large"][0] == 7 })
	if n := w.failed["gave_way"]; n > 0 {
		t.Errorf("%d plans had to give way", n)
	}
}

// Where memory comes free without end, a small group waits a second for a large one that goes first and finds no room, and not
// longer: whatever the rhythm of the one, and of the moments at which the other is looked at.
func TestMemoryThatComesFreeWithoutEndHoldsUpNobodyForLong(t *testing.T) {
	for _, tc := range []struct{ free, tick time.Duration }{
		{free: 50 * time.Millisecond, tick: 100 * time.Millisecond},
		{free: 220 * time.Millisecond, tick: 100 * time.Millisecond},
		{free: 300 * time.Millisecond, tick: 100 * time.Millisecond},
		{free: 50 * time.Millisecond, tick: 400 * time.Millisecond}, // On a busy machine.
	} {
		t.Run(fmt.Sprintf("every %v, seen every %v", tc.free, tc.tick), func(t *testing.T) {
			w := newWorld(t, 1)
			var free, tick time.Time
			instant := func() {
				w.now = w.now.Add(10 * time.Millisecond)
				if w.now.Sub(free) >= tc.free {
					free = w.now
					w.book.Freed()
				}
				if w.now.Sub(tick) >= tc.tick {
					tick = w.now
					w.book.Tick(w.now)
				}
				w.lookAtAll()
			}
			for range 9 { // One more than there are cards.
				w.create("never", 9, 16, "t")
			}
			for range 300 {
				instant()
			}
			for range 2 {
				w.create("small", 2, 16, "t")
			}
			begun := w.now
			for len(w.released) == 0 && w.now.Sub(begun) < time.Minute {
				instant()
			}
			if took := w.now.Sub(begun); took > 1500*time.Millisecond { // A tick comes upon that.
				t.Errorf("it has waited for %v", took)
			}
		})
	}
}

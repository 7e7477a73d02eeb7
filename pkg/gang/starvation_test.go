package gang_test

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gang"
)

// crowd lets single pods of half a card come without end, each of which runs for a minute, beside a group that needs six whole
// cards of eight. It returns how long the group waited, and whether it ran.
func crowd(t *testing.T, claimAfter time.Duration) (waited time.Duration, ran bool) {
	w := newWorld(t, 1)
	w.claimAfter = claimAfter
	w.restart()
	start := w.now
	ends := map[*pod]time.Time{}
	for i := range 16 {
		w.create("", 0, 8, "")
		w.step() // They don't begin at once, and don't end at once.
		ends[w.order[len(w.order)-1]] = w.now.Add(time.Duration(10+4*i) * time.Second)
	}
	for range 6 {
		w.create("big", 6, 16, "t")
	}
	for w.now.Before(start.Add(15 * time.Minute)) {
		queued := 0
		for _, p := range w.sorted() {
			switch {
			case p.Group.Name != "":
			case p.Node == "":
				queued++
			case ends[p].IsZero():
				ends[p] = w.now.Add(time.Minute)
			case w.now.After(ends[p]):
				w.delete(p)
			}
		}
		for ; queued < 8; queued++ {
			w.create("", 0, 8, "")
		}
		for _, p := range w.order {
			p.queued = p.Node == "" && !w.flies(p)
		}
		for range 40 {
			w.step()
			w.act()
		}
		for len(w.released) > 0 {
			c := w.released[0]
			w.released = w.released[1:]
			w.bind(c, false)
			w.act()
		}
		w.pass(500 * time.Millisecond)
		w.check()
		if w.groups()["big"][0] == 6 {
			return w.now.Sub(start), true
		}
	}
	return 0, false
}

func TestSinglePodsDoNotStarveAGroup(t *testing.T) {
	// Claims last 20 s, 40 s and 80 s, with as much between them; the third is longer than a pod runs.
	const bound = (20 + 2*20 + 2*40 + 80) * time.Second
	waited, ran := crowd(t, 20*time.Second)
	if !ran || waited > bound {
		t.Errorf("the group ran: %t, after %v; want within %v", ran, waited, bound)
	}
	t.Logf("the group ran after %v", waited)
	if waited, ran := crowd(t, 0); ran {
		t.Errorf("without claims it ran after %v: then this shows nothing", waited)
	}
}

func TestAClaimEndsWithItsGroup(t *testing.T) {
	w := newWorld(t, 1)
	for range 9 { // One more than there are cards.
		w.create("big", 9, 16, "t")
	}
	for range 4 {
		w.create("fits", 4, 16, "t")
	}
	for range 4 { // They wait for room that a single pod of half the cluster's cards takes.
		w.create("", 0, 16, "")
	}
	w.rest()
	if w.groups()["fits"][0] != 4 || w.groups()["big"][0] != 0 {
		t.Fatalf("bound are %v", w.groups())
	}
	if w.claimed > 0 {
		t.Errorf("%d claims for a group that wouldn't fit if it were alone", w.claimed)
	}
	for range 4 {
		w.create("next", 8, 16, "t")
		w.create("next", 8, 16, "t")
	}
	w.rest()
	if w.claimed == 0 {
		t.Error("no claim for a group that waits for all cards")
	}
	for _, p := range w.sorted() {
		if p.Group.Name == "next" || p.Group.Name == "" && p.Node != "" {
			w.delete(p)
		}
	}
	for range 4 {
		w.create("", 0, 16, "")
	}
	w.rest()
	if states := w.book.States(); states[gang.StateWhole] != 1 {
		t.Errorf("%v", states)
	}
	singles := 0
	for _, p := range w.sorted() {
		if p.Group.Name == "" && p.Node != "" {
			singles++
		}
	}
	if singles != 4 {
		t.Errorf("%d single pods run beside a group of 4, want 4: what was claimed is still kept", singles)
	}
}

// A claim that served ends with the plan that it made possible. Should that come to nothing, the next claim waits for as long
// as this one lasted.
func TestAfterAClaimOthersHaveTheirTurn(t *testing.T) {
	w := newWorld(t, 1)
	w.create("", 0, 16, "")
	single := w.order[0]
	w.step()
	w.act()
	for range 8 {
		w.create("big", 8, 16, "t")
	}
	for range 20 { // They are asked about, and refused.
		w.step()
	}
	w.pass(w.claimAfter + time.Second)
	if w.claimed != 1 {
		t.Fatalf("%d claims", w.claimed)
	}
	w.pass(4 * time.Second)
	w.delete(single)
	w.pass(200 * time.Millisecond)
	if got := w.book.States()[gang.StatePlaced]; got != 1 {
		t.Fatalf("the group has no places: %v", w.book.States())
	}
	// A member is made anew, and somebody else takes a card.
	for _, p := range w.sorted() {
		w.delete(p)
		w.create("big", 8, 16, "t")
		break
	}
	w.create("", 0, 16, "")
	for range 20 {
		w.step()
	}
	w.pass(3 * time.Second)
	if w.claimed != 1 {
		t.Errorf("memory is claimed again %v after a claim that lasted longer", 3*time.Second)
	}
	w.pass(3 * time.Second)
	if w.claimed != 2 {
		t.Errorf("%d claims in the end, want 2", w.claimed)
	}
}

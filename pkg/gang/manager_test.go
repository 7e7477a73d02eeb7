package gang_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// Whoever changes the group's size while members are on their way changes how many must be placed together.
func TestASizeThatChangesOnTheWay(t *testing.T) {
	for name, tc := range map[string]struct {
		cards, size, members, bound int
	}{
		"one more, for whom there is no room": {cards: 3, size: 4, members: 4, bound: 0},
		"one more, and room":                  {cards: 4, size: 4, members: 4, bound: 4},
		"one more, who doesn't exist":         {cards: 4, size: 4, members: 3, bound: 0},
		"one less":                            {cards: 3, size: 2, members: 3, bound: 3},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1)
			for range 8 - tc.cards {
				w.create("others", 8-tc.cards, 16, "t")
			}
			w.rest()
			for range 3 {
				w.create("job", 3, 16, "t")
			}
			w.step()
			w.step()
			if len(w.held) != 2 {
				t.Fatalf("%d binds are held", len(w.held))
			}
			for range tc.members - 3 {
				w.create("job", tc.size, 16, "t")
			}
			for _, p := range w.sorted() {
				if p.Group.Name == "job" {
					p.Size = tc.size
					w.tell(p)
				}
			}
			w.rest()
			if got := w.groups()["job"][0]; got != tc.bound {
				t.Errorf("%d are bound, want %d", got, tc.bound)
			}
		})
	}
}

// Members agree, or are enough, once others are gone or edited, and no new one comes that would bring them back.
func TestAGroupThatBecomesCompleteWithoutANewMember(t *testing.T) {
	for name, change := range map[string]func(w *world, old []*pod){
		"one of another size is made before the old one is gone": func(w *world, old []*pod) {
			for range 4 {
				w.create("job", 4, 16, "t")
			}
			w.lookAtAll()
			for _, p := range old {
				w.delete(p)
				w.pass(time.Second)
			}
		},
		"the size is edited": func(w *world, old []*pod) {
			for _, p := range old {
				p.Size, p.queued = 4, true
				w.tell(p)
				w.lookAtAll()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1)
			w.claimAfter = 0 // The end of a claim wakes everybody.
			w.restart()
			w.act() // The nodes have come.
			for i := range 4 {
				w.create("job", 8, 16, fmt.Sprint("t", i))
			}
			w.lookAtAll()
			change(w, w.sorted())
			w.rest()
			if got := w.groups()["job"]; got != [2]int{4, 0} {
				t.Errorf("bound and waiting are %v", got)
			}
		})
	}
}

// Members that were put aside while the group paused, or by another extender, are called when that is over, also where no room is
// looked for at that moment.
func TestMembersThatWerePutAsideAreCalled(t *testing.T) {
	start := func(t *testing.T) *world {
		w := newWorld(t, 1)
		w.act()       // The nodes have come.
		for range 9 { // One more than there are cards.
			w.create("never", 9, 16, "t")
		}
		w.lookAtAll()
		w.pass(3 * time.Second) // Ages are in whole seconds.
		return w
	}
	queued := func(w *world, name string) bool {
		return slices.ContainsFunc(w.sorted(), func(p *pod) bool { return p.Group.Name == name && p.queued })
	}
	t.Run("after a pause, while memory comes free", func(t *testing.T) {
		w := start(t)
		for range 2 {
			w.create("small", 2, 16, "t")
		}
		w.lookAtAll()
		w.lookAtAll()
		if len(w.released) != 1 {
			t.Fatalf("%d binds are on their way", len(w.released))
		}
		w.bind(w.released[0], true)
		w.released = nil
		w.act()
		w.lookAtAll() // The pause has begun.
		w.pass(800 * time.Millisecond)
		if queued(w, "small") {
			t.Fatal("it was called before its pause was over")
		}
		w.book.Freed() // The group that goes first waits for more of that.
		w.pass(time.Second)
		if !queued(w, "small") {
			t.Error("nobody calls it")
		}
	})
	t.Run("by an extender that begins to lead again", func(t *testing.T) {
		w := start(t)
		w.book.Freed()
		w.pass(time.Second) // There was no room just now.
		w.book.Suspend(w.now)
		w.book.Inherit()
		w.pass(time.Second)
		if !queued(w, "never") {
			t.Error("nobody calls it")
		}
	})
}

// Members that nobody makes are waited for in vain: a StatefulSet that makes its next pod when the last one runs never has all of
// them. That is told, once.
func TestAGroupThatStaysIncompleteIsTold(t *testing.T) {
	complaints := func(w *world) (n int) {
		for _, told := range w.told {
			if strings.HasPrefix(told, gang.EventIncomplete+": The group needs 3 members and only ") {
				n++
			}
		}
		return n
	}
	w := newWorld(t, 1)
	w.create("web", 3, 16, "t")
	w.rest()
	if n := complaints(w); n != 1 || !slices.ContainsFunc(w.told, func(s string) bool { return strings.Contains(s, "only 1 exist") }) {
		t.Errorf("told: %q", w.told)
	}
	w.create("web", 3, 16, "t")
	w.pass(worldPatience / 2)
	w.create("web", 3, 16, "t")
	w.rest()
	if n := complaints(w); n != 1 || w.groups()["web"][0] != 3 {
		t.Errorf("told: %q; bound are %v", w.told, w.groups())
	}
	// Whoever runs doesn't wait for anybody.
	for _, p := range w.sorted()[:1] {
		w.delete(p)
	}
	w.rest()
	if n := complaints(w); n != 1 {
		t.Errorf("told: %q", w.told)
	}
}

// Members that can't be placed as they are don't count, but they do exist: nobody is told to make them.
func TestMembersThatExistAndCanNotBePlacedAreNotTakenForMissing(t *testing.T) {
	for name, tc := range map[string]struct {
		hinder, mend func(*pod)
		cardless     bool
	}{
		"scheduling gates": {
			hinder: func(p *pod) { p.Gated = true }, mend: func(p *pod) { p.Gated = false },
		},
		"no number that can be read": {
			hinder: func(p *pod) { p.Problem, p.Size = "x is no number", 0 }, mend: func(p *pod) { p.Problem, p.Size = "", 3 },
		},
		"scheduling gates, and another that doesn't count": {
			hinder: func(p *pod) { p.Gated = true }, mend: func(p *pod) { p.Gated = false }, cardless: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 1)
			if tc.cardless {
				launcher := gang.Member{Group: gang.Key{Namespace: "default", Name: "job"}, Size: 3, Created: w.now, Cardless: true}
				launcher.UID, launcher.Namespace, launcher.Name = "launcher", "default", "launcher"
				w.book.Seen(launcher, w.now)
			}
			for range 3 {
				w.create("job", 3, 16, "t")
			}
			hindered := w.sorted()[2]
			tc.hinder(hindered)
			hindered.queued = false
			w.tell(hindered)
			w.rest()
			want := []string{gang.EventIncomplete + ": The group needs 3 members and only 2 can be placed: they wait for the others. " +
				"Some of those exist, but have scheduling gates or can't be counted as members"}
			if told := slices.DeleteFunc(w.told, func(s string) bool { return !strings.HasPrefix(s, gang.EventIncomplete) }); !slices.Equal(told, want) {
				t.Errorf("told: %q", told)
			}
			tc.mend(hindered)
			hindered.queued = true
			w.tell(hindered)
			w.rest()
			if n := w.groups()["job"][0]; n != 3 {
				t.Errorf("%d are bound", n)
			}
		})
	}
}

// Where the missing ones exist but ask for no cards that is told, and nothing else beside it again and again.
func TestMembersThatDoNotCountAreTold(t *testing.T) {
	w := newWorld(t, 1)
	w.create("mpi", 2, 16, "t")
	launcher := gang.Member{Group: gang.Key{Namespace: "default", Name: "mpi"}, Size: 2, Created: w.now, Cardless: true}
	launcher.UID, launcher.Namespace, launcher.Name = "launcher", "default", "launcher"
	w.book.Seen(launcher, w.now)
	w.step()
	w.pass(10 * worldPatience)
	for _, p := range w.order {
		p.queued = true
	}
	w.step()
	w.act()
	if len(w.told) != 1 || !strings.Contains(w.told[0], "1 ask for none") {
		t.Errorf("told: %q", w.told)
	}
}

// A name counts within its namespace.
func TestOneNameInTwoNamespaces(t *testing.T) {
	w := newWorld(t, 1)
	for i, namespace := range []string{"a", "b"} {
		m := gang.Member{Group: gang.Key{Namespace: namespace, Name: "job"}, Size: 2 + i, Created: w.now, Template: "t"}
		m.UID, m.Namespace, m.Name, m.Request = gpu.PodUID(namespace), namespace, "pod", 8
		w.book.Seen(m, w.now)
		want := []string{"gang: 1 of 2 members exist", "gang: 1 of 3 members exist"}[i]
		if answer := w.book.Filter(m.UID, w.nodes, w.now); answer.Why.Text != want {
			t.Errorf("%s: %q, want %q", namespace, answer.Why.Text, want)
		}
	}
	w.book.Gone("a", w.now)
	if _, known := w.book.Group("b"); !known {
		t.Error("the other namespace's group is gone too")
	}
}

package gang

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// group is a group with at least one member. The Book's lock guards it.
type group struct {
	key     Key
	members map[gpu.PodUID]*member
	// size is how many must be placed together, 0 where the members disagree.
	size int
	// whole says that the group has been whole once: its members come and go as others do.
	whole bool
	// broken says that the barrier opened, for this process or one before it, and not all were bound.
	broken bool
	// evicting says that the group was given up, and its running members are to leave.
	evicting bool

	plan *plan
	// offers are the nodes that kube-scheduler last offered to members of each template.
	offers map[string][]string
	// tried is when planning last found no room, and freed how often memory had come free by then.
	tried time.Time
	freed uint64
	// looked is how often memory had come free when room was last looked for.
	looked uint64
	// failures are the rounds in a row that failed; no new one begins before notBefore.
	failures  int
	notBefore time.Time
	// stale says that members may have been put aside whom nothing else will bring back.
	stale bool
	// partialSince is since when some members run and others are missing; zero while that isn't so.
	partialSince time.Time
	evictedAt    time.Time
	// waitingSince is since when all members exist and wait.
	waitingSince time.Time
	// incompleteSince is since when no more than so many members exist, of whom some wait for the rest; zero while that isn't so.
	incompleteSince time.Time
	incomplete      int
	// claimed is how long memory was kept for it last.
	claimed time.Duration
	// unclaimable is when that was last found to be no use.
	unclaimable time.Time
	// told is what Events have said already.
	told string
}

type member struct {
	Member
	// refused says that kube-scheduler may have put the pod aside: only an event brings it back.
	refused bool
	// told is the problem that an Event has told.
	told string
	// bound says that our own bind of it succeeded, whatever the watch still tells.
	bound bool
}

// census counts a group's members.
type census struct {
	waiting, running, hindered, cardless int
	// done are those that have succeeded and come from the same controller as one that is alive: not from an earlier run.
	done int
	// proven says that one of the running ones proves that the group was whole.
	proven bool
}

// exist counts the members that there are, or were and did their part.
func (c census) exist() int { return c.waiting + c.running + c.done }

// mismatch says whether enough pods name the group, and too few of them ask for cards.
func (c census) mismatch(size int) bool {
	ask := c.exist() + c.hindered
	return ask < size && ask+c.cardless >= size
}

// binding says whether the barrier has opened and binds are under way.
func (g *group) binding() bool { return g.plan != nil && g.plan.isOpen() }

func (g *group) census() census {
	var c census
	controllers := map[string]bool{}
	for _, m := range g.members {
		switch {
		case m.waiting():
			c.waiting++
		case m.running():
			c.running++
			c.proven = c.proven || m.Proof
		case m.hindered():
			c.hindered++
			continue
		case m.Cardless:
			c.cardless++
			continue
		default:
			continue
		}
		if m.Controller != "" {
			controllers[m.Controller] = true
		}
	}
	for _, m := range g.members {
		if m.Succeeded && controllers[m.Controller] {
			c.done++
		}
	}
	return c
}

// recount brings what follows from the members up to date.
func (g *group) recount() {
	size := 0
	for _, m := range g.members {
		if m.Size == 0 || m.Ended || m.Leaving {
			continue
		}
		if size != 0 && size != m.Size {
			size = -1
			break
		}
		size = m.Size
	}
	g.size = max(size, 0)
	c := g.census()
	switch {
	case g.size > 0 && c.running+c.done >= g.size, c.proven:
		g.stale = g.stale || !g.whole
		g.whole, g.broken, g.evicting, g.failures = true, false, false, 0
	case c.running == 0 && c.done == 0 && !g.binding():
		g.whole, g.broken = false, false
	}
	if g.evicting && c.running == 0 {
		g.evicting, g.stale = false, true
	}
}

// judge notes since when the group is in the state that it is in. It is for when every member is known.
func (g *group) judge(now time.Time) census {
	c := g.census()
	binding := g.binding()
	if !g.whole && !g.broken && !binding && g.size > 0 && c.running > 0 && c.waiting > 0 {
		// Somebody else bound those who run, before this process led.
		if g.lostSome(c) {
			g.whole, g.stale = true, true
		} else {
			g.broken = true
		}
	}
	// Where the members disagree on the size nobody can say who is missing.
	if partial := !g.whole && !binding && g.size > 0 && c.running > 0 && (c.waiting > 0 || g.broken); !partial {
		g.partialSince = time.Time{}
	} else if g.partialSince.IsZero() {
		g.partialSince = now
	}
	switch exist := c.exist(); {
	case g.whole || binding || c.waiting == 0 || exist >= g.size:
		g.incompleteSince = time.Time{}
	case g.incompleteSince.IsZero() || exist != g.incomplete:
		g.incompleteSince, g.incomplete = now, exist
	}
	ready := !g.whole && g.size > 0 && c.waiting > 0 && c.exist() >= g.size
	if !ready {
		g.waitingSince = time.Time{}
	} else if g.waitingSince.IsZero() {
		g.waitingSince = now
	}
	return c
}

// lostSome says whether members must have gone since those who run were bound: a group's first bind isn't made before all of
// its members exist, and of those there were then too few are left. Then those who wait replace others, so the group is taken
// for one that was whole, though nobody who could prove it is left. Who is wrong here the other way round evicts a job that runs.
func (g *group) lostSome(c census) bool {
	var bound time.Time
	for _, m := range g.members {
		switch {
		case !m.running():
		case m.BoundAt.IsZero():
			return false
		case m.BoundAt.After(bound):
			bound = m.BoundAt
		}
	}
	were := c.running + c.done
	for _, m := range g.members {
		if m.waiting() && !m.Created.After(bound) {
			were++
		}
	}
	return were < g.size
}

// before is the order in which groups are served: those that are bound in part, then by priority, age and name.
func before(a, b *group) bool { return compare(a, b) < 0 }

func compare(a, b *group) int {
	partial := func(g *group) int {
		if g.partialSince.IsZero() {
			return 1
		}
		return 0
	}
	return cmp.Or(
		cmp.Compare(partial(a), partial(b)),
		cmp.Compare(b.priority(), a.priority()),
		a.born().Compare(b.born()),
		strings.Compare(a.key.String(), b.key.String()),
	)
}

// priority is the highest of the members'.
func (g *group) priority() int32 {
	first, priority := true, int32(0)
	for _, m := range g.members {
		if first || m.Priority > priority {
			first, priority = false, m.Priority
		}
	}
	return priority
}

// born is when the first of its members was created.
func (g *group) born() time.Time {
	var born time.Time
	for _, m := range g.members {
		if !m.Ended && (born.IsZero() || m.Created.Before(born)) {
			born = m.Created
		}
	}
	return born
}

// sorted returns the members that pass, oldest first.
func (g *group) sorted(pass func(*member) bool) []*member {
	var out []*member
	for _, m := range g.members {
		if pass(m) {
			out = append(out, m)
		}
	}
	slices.SortFunc(out, func(a, b *member) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	return out
}

// speaker is the member that Events of the group are about.
func (g *group) speaker() (gpu.Pod, bool) {
	all := g.sorted(func(m *member) bool { return !m.Ended && !m.Cardless })
	if len(all) == 0 {
		return gpu.Pod{}, false
	}
	return all[0].Pod, true
}

package gang

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// gang is the state of one gang. It exists while the gang has members or binds in flight. The Manager's lock guards it.
type gang struct {
	key     Key
	members map[gpu.PodUID]*member
	// size is how many members must be bound together; 0 if the members disagree.
	size int
	// whole is true once all members have been bound, or if the gang is treated as if they had been: its further members
	// are placed like pods without a gang.
	whole bool
	// partial is true if the barrier opened, in this process or an earlier one, and not all members were bound.
	partial bool
	// evicting is true while the bound members of a partial gang are being evicted.
	evicting bool

	plan *plan
	// candidates are the latest candidate nodes by Member.Template.
	candidates map[string][]string
	// noRoomAt is when planning last found no room, noRoomFreed the value of Manager.freed at that time.
	noRoomAt    time.Time
	noRoomFreed uint64
	// plannedFreed is the value of Manager.freed at the latest attempt to plan.
	plannedFreed uint64
	// failures counts consecutive failed rounds. The next one may not begin before notBefore.
	failures  int
	notBefore time.Time
	// needsRequeue is true if there may be rejected members that nothing else requeues.
	needsRequeue bool
	// partialSince is when the gang became partial; zero if it isn't.
	partialSince time.Time
	evictedAt    time.Time
	// readySince is when enough members existed to plan the gang; zero if they don't, or if none is pending.
	readySince time.Time
	// incompleteSince is since when exactly incomplete members exist, fewer than size; zero if they are enough, or if
	// none is pending.
	incompleteSince time.Time
	incomplete      int
	// reservedFor is the duration of the latest starvation reservation.
	reservedFor time.Duration
	// notReservable is when a starvation reservation last failed.
	notReservable time.Time
	// lastEvent is the reason and text of the latest Event.
	lastEvent string
}

type member struct {
	Member
	// rejected is true if kube-scheduler may have parked the pod, which then needs a requeue.
	rejected bool
	// reportedProblem is the problem for which an Event was recorded.
	reportedProblem string
	// bound is true if our bind of the pod succeeded, even if the watch has not reported it yet.
	bound bool
}

// memberCounts counts the members of a gang by state.
type memberCounts struct {
	pending, running, ineligible, cardless int
	// succeeded counts the members that have succeeded and share a controller with a pending or running member. Others
	// are of an earlier run.
	succeeded int
	// markedWhole is true if a running member marks the gang as whole.
	markedWhole bool
}

// existing counts the members that are pending or running, or have succeeded.
func (counts memberCounts) existing() int { return counts.pending + counts.running + counts.succeeded }

// tooFewAskForCards reports whether enough pods name the gang, but too few of them ask for cards.
func (counts memberCounts) tooFewAskForCards(size int) bool {
	asking := counts.existing() + counts.ineligible
	return asking < size && asking+counts.cardless >= size
}

// binding reports whether the barrier is open and binds are in flight.
func (g *gang) binding() bool { return g.plan != nil && g.plan.isOpen() }

func (g *gang) count() memberCounts {
	var counts memberCounts
	controllers := map[string]bool{}
	for _, m := range g.members {
		switch {
		case m.pending():
			counts.pending++
		case m.running():
			counts.running++
			counts.markedWhole = counts.markedWhole || m.MarkedWhole
		case m.ineligible():
			counts.ineligible++
			continue
		case m.Cardless:
			counts.cardless++
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
			counts.succeeded++
		}
	}
	return counts
}

// membersChanged updates the size, and the states that follow from the members alone.
func (g *gang) membersChanged() {
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
	counts := g.count()
	switch {
	case g.size > 0 && counts.running+counts.succeeded >= g.size, counts.markedWhole:
		g.needsRequeue = g.needsRequeue || !g.whole
		g.whole, g.partial, g.evicting, g.failures = true, false, false, 0
	case counts.running == 0 && counts.succeeded == 0 && !g.binding():
		g.whole, g.partial = false, false
	}
	if g.evicting && counts.running == 0 {
		g.evicting, g.needsRequeue = false, true
	}
}

// updateState updates the states that need the time or all members. The cache must be synced.
func (g *gang) updateState(now time.Time) memberCounts {
	counts := g.count()
	binding := g.binding()
	if !g.whole && !g.partial && !binding && g.size > 0 && counts.running > 0 && counts.pending > 0 {
		// The running members were bound before this process became the leader.
		if g.lostMembers(counts) {
			g.whole, g.needsRequeue = true, true
		} else {
			g.partial = true
		}
	}
	// If the members disagree on the size, it is unknown how many are missing.
	if partial := !g.whole && !binding && g.size > 0 && counts.running > 0 && (counts.pending > 0 || g.partial); !partial {
		g.partialSince = time.Time{}
	} else if g.partialSince.IsZero() {
		g.partialSince = now
	}
	switch exist := counts.existing(); {
	case g.whole || binding || counts.pending == 0 || exist >= g.size:
		g.incompleteSince = time.Time{}
	case g.incompleteSince.IsZero() || exist != g.incomplete:
		g.incompleteSince, g.incomplete = now, exist
	}
	ready := !g.whole && g.size > 0 && counts.pending > 0 && counts.existing() >= g.size
	if !ready {
		g.readySince = time.Time{}
	} else if g.readySince.IsZero() {
		g.readySince = now
	}
	return counts
}

// lostMembers reports whether members must have been deleted since the running ones were bound. A gang's first bind
// isn't made before all its members exist. If too few of those that existed at the latest bind are left, the pending
// members replace others, and the gang counts as whole although no running member marks it. The opposite error would
// evict a running job.
func (g *gang) lostMembers(counts memberCounts) bool {
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
	existed := counts.running + counts.succeeded
	for _, m := range g.members {
		if m.pending() && !m.Created.After(bound) {
			existed++
		}
	}
	return existed < g.size
}

// before reports whether a goes before b: partial gangs go first, then by priority, age and name.
func before(a, b *gang) bool { return compareGangs(a, b) < 0 }

func compareGangs(a, b *gang) int {
	partial := func(g *gang) int {
		if g.partialSince.IsZero() {
			return 1
		}
		return 0
	}
	return cmp.Or(
		cmp.Compare(partial(a), partial(b)),
		cmp.Compare(b.priority(), a.priority()),
		a.created().Compare(b.created()),
		strings.Compare(a.key.String(), b.key.String()),
	)
}

// priority returns the highest priority of the members.
func (g *gang) priority() int32 {
	first, priority := true, int32(0)
	for _, m := range g.members {
		if first || m.Priority > priority {
			first, priority = false, m.Priority
		}
	}
	return priority
}

// created returns when the oldest member was created.
func (g *gang) created() time.Time {
	var born time.Time
	for _, m := range g.members {
		if !m.Ended && (born.IsZero() || m.Created.Before(born)) {
			born = m.Created
		}
	}
	return born
}

// sorted returns the members that pass, oldest first.
func (g *gang) sorted(pass func(*member) bool) []*member {
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

// eventPod returns the member on which the gang's Events are recorded.
func (g *gang) eventPod() (gpu.Pod, bool) {
	all := g.sorted(func(m *member) bool { return !m.Ended && !m.Cardless })
	if len(all) == 0 {
		return gpu.Pod{}, false
	}
	return all[0].Pod, true
}

package gang

import (
	"maps"
	"slices"
)

// tally counts the members of a run. The cost of a change doesn't depend on the number of members.
type tally struct {
	counts [categories]int
	// sizes counts the members that exist by the size that they name.
	sizes map[int]int
	// priorities counts pending and bound members by priority.
	priorities map[int32]int
	// marked counts the members that mark the run as whole.
	marked int
}

func newTally() tally { return tally{sizes: map[int]int{}, priorities: map[int32]int{}} }

// add counts a member n times; n is 1, or -1 for a member that counted before.
func (t *tally) add(m *member, n int) {
	what := m.counted
	t.counts[what] += n
	if m.MarkedWhole {
		t.marked += n
	}
	if what != other && what != succeeded && m.Size > 0 {
		addTo(t.sizes, m.Size, n)
	}
	if what == pending || what == bound {
		addTo(t.priorities, m.Priority, n)
	}
}

func addTo[K comparable](counts map[K]int, key K, n int) {
	counts[key] += n
	if counts[key] == 0 {
		delete(counts, key)
	}
}

// size returns how many members must be bound together: the largest number that a member names, 0 if none does.
func (t *tally) size() (size int) {
	for named := range t.sizes {
		size = max(size, named)
	}
	return size
}

// existing counts the members that are pending or bound, or have succeeded.
func (t *tally) existing() int { return t.counts[pending] + t.counts[bound] + t.counts[succeeded] }

// unbound counts the members that could be bound.
func (t *tally) unbound() int { return t.counts[pending] + t.counts[ineligible] }

// lacking is how many pending members must be bound together.
func (t *tally) lacking() int { return t.size() - t.counts[bound] - t.counts[succeeded] }

// enough reports whether the members that must be bound together exist.
func (t *tally) enough() bool {
	return t.size() > 0 && t.counts[pending] > 0 && t.existing() >= t.size()
}

// whole reports whether all members are bound, or have been.
func (t *tally) whole() bool {
	return t.marked > 0 || t.size() > 0 && t.lacking() <= 0
}

// priority returns the lowest priority of the members that count.
func (t *tally) priority() int32 {
	if len(t.priorities) == 0 {
		return 0
	}
	return slices.Min(slices.Collect(maps.Keys(t.priorities)))
}

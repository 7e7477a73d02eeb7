package gang

import (
	"cmp"
	"container/heap"
	"slices"
	"strings"
	"time"
)

// rank determines which of two runs goes first.
type rank struct {
	// broken runs go before all others, since each of their bound members wastes memory.
	broken   bool
	priority int32
	// failedAt is when the latest round failed; zero if none did since something relevant changed.
	failedAt time.Time
	created  time.Time
	name     string
}

// compare returns a negative number if a goes before b.
func (a rank) compare(b rank) int {
	switch {
	case a.broken != b.broken && a.broken:
		return -1
	case a.broken != b.broken:
		return 1
	}
	return cmp.Or(
		cmp.Compare(b.priority, a.priority),
		a.failedAt.Compare(b.failedAt), // A zero time is before all others.
		a.created.Compare(b.created),
		strings.Compare(a.name, b.name),
	)
}

// runList is a list of runs in their order. The rank of a run must not change while it is on a list: see reorder.
type runList []*run

func (l *runList) insert(r *run) {
	i, _ := slices.BinarySearchFunc(*l, r.rank, func(o *run, rank rank) int { return o.rank.compare(rank) })
	*l = slices.Insert(*l, i, r)
}

func (l *runList) remove(r *run) {
	if i, found := slices.BinarySearchFunc(*l, r.rank, func(o *run, rank rank) int { return o.rank.compare(rank) }); found && (*l)[i] == r {
		*l = slices.Delete(*l, i, i+1)
	}
}

// reorder puts the run on the list where its phase, members and failures belong now.
func (mgr *Manager) reorder(r *run) {
	mgr.waiting.remove(r)
	mgr.placed.remove(r)
	r.rank = rank{
		broken: r.counts[running] > 0, priority: r.priority(), failedAt: r.failedAt, created: r.created, name: r.key.String(),
	}
	switch r.phase {
	case PhasePending, PhaseBroken:
		if r.enough() {
			mgr.waiting.insert(r)
		}
	case PhasePlanned, PhasePermitting:
		mgr.placed.insert(r)
	}
}

// alarm is a time at which something is due for a run.
type alarm struct {
	at  time.Time
	run *run
}

// alarms is a heap of alarms, the earliest first. An alarm that the run doesn't need any more does nothing.
type alarms []alarm

// wake makes Tick call due for the run at the given time.
func (mgr *Manager) wake(r *run, at time.Time) { heap.Push(&mgr.alarms, alarm{at, r}) }

// Len implements heap.Interface.
func (a alarms) Len() int { return len(a) }

// Less implements heap.Interface.
func (a alarms) Less(i, j int) bool { return a[i].at.Before(a[j].at) }

// Swap implements heap.Interface.
func (a alarms) Swap(i, j int) { a[i], a[j] = a[j], a[i] }

// Push implements heap.Interface.
func (a *alarms) Push(x any) { *a = append(*a, x.(alarm)) }

// Pop implements heap.Interface.
func (a *alarms) Pop() any {
	last := (*a)[len(*a)-1]
	*a = (*a)[:len(*a)-1]
	return last
}

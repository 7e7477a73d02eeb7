package gang

import (
	"cmp"
	"slices"
	"time"
)

// rank determines which of two runs goes first.
type rank struct {
	// broken runs go before all others, because each of their bound members wastes memory.
	broken   bool
	priority int32
	// failedAt is when a run of this shape last failed; zero if none has failed since one was bound.
	failedAt time.Time
	created  time.Time
	key      Key
}

// compare returns a negative number if a goes before b.
func (a rank) compare(b rank) int {
	if a.broken != b.broken {
		if a.broken {
			return -1
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(b.priority, a.priority),
		a.failedAt.Compare(b.failedAt), // A zero time is before all others.
		a.created.Compare(b.created),
		a.key.Compare(b.key),
	)
}

// runList is a list of runs in their order. The rank of a run must not change while it is on a list: see reorder.
type runList []*run

func (l *runList) find(r *run) (int, bool) {
	return slices.BinarySearchFunc(*l, r.rank, func(o *run, rank rank) int { return o.rank.compare(rank) })
}

func (l *runList) insert(r *run) {
	i, _ := l.find(r)
	*l = slices.Insert(*l, i, r)
}

func (l *runList) remove(r *run) {
	if i, found := l.find(r); found && (*l)[i] == r {
		*l = slices.Delete(*l, i, i+1)
	}
}

// reorder moves the run to the list and the position that follow from its phase, members and failures.
func (mgr *Manager) reorder(r *run) {
	mgr.waiting.remove(r)
	mgr.placed.remove(r)
	r.rank = rank{broken: r.counts[bound] > 0, priority: r.priority(), created: r.created, key: r.key}
	if r.waits() && mgr.Failures.Any(r.key.Namespace) {
		_, r.rank.failedAt = mgr.Failures.Of(mgr.attempt(r))
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

// alarm is a time at which something is due for a run. An alarm that the run doesn't need any more has no effect.
type alarm struct {
	at  time.Time
	run *run
}

// wake makes Tick call due for the run at the given time. mgr.alarms is ordered, the latest first.
func (mgr *Manager) wake(r *run, at time.Time) {
	i, _ := slices.BinarySearchFunc(mgr.alarms, at, func(a alarm, at time.Time) int { return at.Compare(a.at) })
	mgr.alarms = slices.Insert(mgr.alarms, i, alarm{at, r})
}

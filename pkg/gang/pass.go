package gang

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

const (
	// noRoomMax is how long the result "no room" stays valid if no memory is freed. It is limited, because nodes can become eligible for other
	// reasons. It stays valid for the quietPeriod even if memory is freed, because all members of a run are filtered within milliseconds.
	noRoomMax = 2 * time.Second
	// quietPeriod is how long no memory must have been freed before a run is planned while a run before it has no room. settle bounds the wait for
	// such a period.
	quietPeriod = 300 * time.Millisecond
	// maxWork is the number of members that one Tick sorts, or tries to place without success, before it leaves the rest to the
	// next one.
	maxWork = 2000
)

// likeRuns identifies the runs of one likeness that may take memory from others (displaces is true), or may not.
type likeRuns struct {
	likeness  string
	displaces bool
}

// noRoom is a result "no room": the run, when it was, and the value of Manager.freed then.
type noRoom struct {
	item  ledger.Item
	at    time.Time
	freed uint64
}

// holdsFor reports whether the result holds for the run, which is that one or is like it: it must not go before that one.
func (n *noRoom) holdsFor(r *run, freed uint64, now time.Time) bool {
	return n.isValid(freed, now) && !r.item.Before(&n.item)
}

func (n *noRoom) isValid(freed uint64, now time.Time) bool {
	ago := now.Sub(n.at)
	return ago < quietPeriod || n.freed == freed && ago < noRoomMax
}

// paused reports whether the run must not be planned because it, or others of its namespace, failed. In the latter case turn is true.
func (mgr *Manager) paused(r *run, now time.Time) (paused, turn bool) {
	if !mgr.Failures.Any(r.key.Namespace) {
		return false, false
	}
	until, turn := mgr.Failures.Until(mgr.attempt(r), now)
	return until.After(now), turn
}

// checkPause records why the run is paused. Once it is no longer, it requeues members whose candidate nodes are needed.
func (mgr *Manager) checkPause(r *run, now time.Time) (paused bool) {
	switch paused, turn := mgr.paused(r, now); {
	case paused && turn:
		r.wait = reasons.GroupBehindFailed
	case paused:
		r.wait = reasons.GroupPaused
	case r.wait == reasons.GroupPaused, r.wait == reasons.GroupBehindFailed:
		r.wait = reasons.GroupAwaitsOthers
		mgr.requeueUnknown(r, now)
	}
	return r.wait == reasons.GroupPaused || r.wait == reasons.GroupBehindFailed
}

// plannable reports whether the run isn't paused, and at least one of its members has candidate nodes. Other runs don't wait for a run that
// isn't plannable.
func (mgr *Manager) plannable(r *run, now time.Time) bool {
	paused, _ := mgr.paused(r, now)
	return len(r.offers) > 0 && !paused
}

// planWaiting tries to plan the waiting runs in their order. While memory is being freed piece by piece, runs behind a run without room
// wait. Otherwise a small group would take memory that a large one is about to get, and give way a moment later, when its first members
// have arrived. This would cost both groups seconds.
func (mgr *Manager) planWaiting(now time.Time) {
	freed := mgr.freed.Load()
	over := mgr.burst.observe(freed, now)
	maps.DeleteFunc(mgr.noRoomFor, func(_ likeRuns, last noRoom) bool { return !last.isValid(freed, now) })
	mgr.work = 0
	first := mgr.resumeAt
	mgr.resumeAt = nil
	for _, r := range slices.Clone(mgr.waiting) {
		if first != nil && r.item.Before(first) || r.plan != nil {
			continue
		}
		if mgr.work >= maxWork {
			next := r.item
			mgr.resumeAt = &next
			return
		}
		if r.needs == nil || r.needs.likeness == "" && len(r.offers) > 0 {
			mgr.work += len(r.members)
		}
		if mgr.checkPause(r, now) || len(r.offers) == 0 || r.key.Native {
			continue
		}
		if reason, ok := mgr.makePlan(r, now); !ok && reason == reasons.GroupNoRoom && !over {
			return
		}
	}
}

// mayPlan reports whether filter may plan r: if memory is being freed, the next Tick tries all runs in their order, see planWaiting. Native groups are
// tried by filter alone.
func (mgr *Manager) mayPlan(r *run, now time.Time) bool {
	over := mgr.burst.observe(mgr.freed.Load(), now)
	return over || !slices.ContainsFunc(mgr.waiting, func(o *run) bool {
		return o.item.Before(&r.item) && !o.key.Native && mgr.plannable(o, now)
	})
}

// freeBurst tracks a burst of freed memory: the pods of a job that ends terminate one after another.
type freeBurst struct {
	count uint64
	// since is when the burst began, zero if it is over; last is when freed memory was last observed.
	since, last time.Time
}

// observe takes the value of Manager.freed and reports whether the burst is over. It can't detect a quiet period between two calls that
// both see more freed memory. So a burst counts as over after settle at the latest.
func (f *freeBurst) observe(freed uint64, now time.Time) bool {
	if freed != f.count {
		if f.since.IsZero() {
			f.since = now
		}
		f.count, f.last = freed, now
	}
	if now.Sub(f.last) >= quietPeriod {
		f.since = time.Time{}
		return true
	}
	return now.Sub(f.since) >= settle
}

package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// verification reads the missing members of a broken run before its bound members are evicted, because the watch may be behind, and the
// answer to a bind may be lost. Every queue.Retry it requests a live read of one missing member. The patience counts only the time between two
// answers between which no read was lost: while the API server doesn't answer, the state of the members is unknown. When the patience is over, every
// missing member is read.
type verification struct {
	// bound is the largest number of members that were bound.
	bound int
	// next is when the next reads or evictions are requested.
	next time.Time
	// answered is when a read was last answered, and waited is what counts for the patience.
	answered time.Time
	waited   time.Duration
	// over is when the patience was over; zero before.
	over time.Time
}

// verify requests the reads or the evictions that are due.
func (mgr *Manager) verify(r *run, now time.Time) {
	v := &r.verification
	if r.counts[bound] == 0 || now.Before(v.next) {
		return
	}
	v.next = now.Add(queue.Retry)
	switch {
	case r.phase == PhaseEvicting:
		for _, m := range r.sorted(func(m *member) bool { return m.counted == bound }) {
			mgr.effects.Evict = append(mgr.effects.Evict, m.Pod)
		}
	case r.phase != PhaseBinding && r.size() > 0: // Otherwise it is unknown how many members are missing.
		mgr.requestReads(r)
	}
}

// requestReads requests a read of one missing member, or of all missing members once the patience is over. If no missing member exists, it
// requests a read of a bound member, to check that the API server answers.
func (mgr *Manager) requestReads(r *run) {
	v := &r.verification
	missing := r.sorted(func(m *member) bool { return m.awaitsBind() && (v.over.IsZero() || m.readAt.Before(v.over)) })
	if len(missing) == 0 {
		missing = r.sorted(func(m *member) bool { return m.counted == bound })
	}
	if v.over.IsZero() {
		missing = missing[:1]
	}
	for _, m := range missing {
		mgr.effects.Verify = append(mgr.effects.Verify, m.Pod)
	}
}

// readAnswered continues the verification after an answer.
func (mgr *Manager) readAnswered(r *run, now time.Time) {
	v := &r.verification
	if r.counts[bound] == 0 || r.size() == 0 || r.phase != PhaseBroken && r.phase != PhasePlanned {
		return
	}
	if v.over.IsZero() {
		if since := now.Sub(v.answered); since < queue.Retry*3/2 { // Answers take two seconds at most.
			v.waited += since
		}
		v.answered = now
		if v.waited < mgr.Patience {
			return
		}
		v.over, v.next = now, now
	}
	for _, m := range r.members {
		if m.awaitsBind() && m.readAt.Before(v.over) {
			return
		}
	}
	mgr.giveUp(r, now)
}

// giveUp ends a broken run whose missing members are known to be unbound: its bound members are evicted, or stay if the
// policy is Keep.
func (mgr *Manager) giveUp(r *run, now time.Time) {
	if r.plan != nil {
		mgr.abandonPlan(r, reasons.GroupExpired, now)
	}
	switch {
	case r.inherited && r.lostMembers():
		// This was checked when the process became the leader. But then the watch may not have reported a deletion yet.
		mgr.startRunning(r, now)
		return
	case mgr.OnFailure == Keep:
		mgr.recordEvent(r, true, EventPartial, "The group stays partially bound: its other members could not be bound in time")
		r.acceptSurplus()
		mgr.startRunning(r, now)
		return
	}
	mgr.move(r, PhaseEvicting, now)
	r.verification.next = now
}

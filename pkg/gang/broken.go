package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// verification reads the missing members of a broken run before its bound members are evicted, because the watch may be behind, and the
// answer to a bind may be lost. Every queue.Retry it requests a live read of one missing member. The patience counts only the time between two
// reads in a row that were answered: while the API server doesn't answer, the state of the members is unknown. When the patience is over, every
// missing member is read.
type verification struct {
	// bound is the largest number of members that were bound.
	bound int
	// next is when the next reads or evictions are requested.
	next time.Time
	// asked is true while a requested read is unanswered.
	asked bool
	// answered is true if the latest read was answered, and waited counts such reads whose former one was answered too.
	answered bool
	waited   int
	// over is when the patience was over; zero before.
	over time.Time
}

// startVerification starts the verification of a run that is broken. After a failed plan it continues the former verification, unless
// further members were bound.
func (mgr *Manager) startVerification(r *run, now time.Time) {
	if n := r.counts[bound]; n > r.verification.bound {
		r.verification = verification{bound: n, next: now}
	}
}

// verify requests the reads or the evictions that are due.
func (mgr *Manager) verify(r *run, now time.Time) {
	v := &r.verification
	if r.counts[bound] == 0 || now.Before(v.next) {
		return
	}
	if v.asked {
		v.answered = false
	}
	switch {
	case r.phase == PhaseEvicting:
		for _, m := range r.sorted(func(m *member) bool { return m.counted == bound }) {
			mgr.effects.Evict = append(mgr.effects.Evict, m.Pod)
		}
	case r.phase == PhaseBinding, r.size() == 0: // It is unknown how many members are missing.
		v.answered = false
	default:
		mgr.requestReads(r)
	}
	v.next = now.Add(queue.Retry)
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
	v.asked = true
}

// readAnswered continues the verification after an answer.
func (mgr *Manager) readAnswered(r *run, now time.Time) {
	v := &r.verification
	if !v.asked || r.phase == PhaseRunning || r.phase == PhaseBinding || r.phase == PhaseEvicting {
		return
	}
	if v.over.IsZero() {
		v.asked = false
		if v.answered {
			v.waited++
		}
		v.answered = true
		if time.Duration(v.waited)*queue.Retry < mgr.Patience {
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

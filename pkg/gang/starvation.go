package gang

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// starvationState holds the starvation reservation. Without it, single pods could take each piece of freed memory before there is
// enough for the first run. When the first run has waited for StarvationAfter, cards with the most free memory are reserved for all its
// members. Pods that use these cards stay. Once they have all ended during the reservation, the run can be placed. Full nodes are not among
// the candidate nodes of filter calls, so all nodes that are eligible for the members are considered.
//
// The first reservation for a run lasts for StarvationAfter, each further one twice as long as the one before. After each
// one there is none for as long as it lasted. One that ends without a plan puts the run behind the others, and costs the
// budget what it kept from other pods.
//
// A run that needs a turn by fair sharing gets none: it would keep memory from tenants whose turn it is.
type starvationState struct {
	run          *run
	begun, until time.Time
	// sampled is when cost was last updated: memory that others could have used, times seconds.
	sampled time.Time
	cost    account
	// next is when the next reservation may begin.
	next time.Time
}

const (
	// maxStarvationReservation bounds the duration of a starvation reservation.
	maxStarvationReservation = time.Hour
	// starvationRetry is the interval between attempts to reserve for a run that doesn't fit.
	starvationRetry = 5 * time.Second
	// starvationSample is the interval between two updates of the cost.
	starvationSample = time.Second
	// offerLifetime is for how long offered nodes show that only memory keeps a member pending.
	offerLifetime = 10 * time.Minute
)

// updateStarvation ends the starvation reservation if its run has a plan or its time is over. It then makes one for the
// first of the waiting runs, if that has waited long enough.
func (mgr *Manager) updateStarvation(now time.Time) {
	s := &mgr.starvation
	if r := s.run; r != nil {
		if now.Sub(s.sampled) >= starvationSample {
			mgr.sampleStarvation(now)
		}
		if r.plan != nil || r.removed || !r.enough() || !now.Before(s.until) || r.needed().any(mgr.NeedsTurn) {
			mgr.endStarvation(now)
		}
	}
	if mgr.StarvationAfter <= 0 || s.run != nil || now.Before(s.next) {
		return
	}
	mgr.refillBudget(now)
	for _, r := range mgr.waiting {
		switch {
		case now.Sub(r.notReservable) < starvationRetry, !mgr.budget.allows(!r.starvedAt.IsZero()), mgr.checkPause(r, now),
			r.needed().any(mgr.NeedsTurn):
			continue
		case now.Sub(r.since) < mgr.StarvationAfter:
			return // Runs behind this one must not reserve before it.
		}
		if mgr.work += len(r.members); r.onlyLacksMemory(now) {
			mgr.startStarvation(r, now)
			return // At most one attempt at a time, since each considers all nodes.
		}
		if r.notReservable = now; mgr.work > 2*maxWork {
			return
		}
	}
}

// startStarvation makes a starvation reservation for the run, if it fits without other pods.
func (mgr *Manager) startStarvation(r *run, now time.Time) {
	requests := mgr.starvationRequests(r)
	if len(requests) == 0 || !mgr.Ledger.ReserveForStarving(requests, r.priority(), r.key.String(), mgr.capacity(true)) {
		r.notReservable = now
		return
	}
	r.reservedFor = min(max(2*r.reservedFor, mgr.StarvationAfter), maxStarvationReservation)
	mgr.starvation = starvationState{run: r, begun: now, until: now.Add(r.reservedFor), sampled: now}
	mgr.Observer.GangStarving()
}

// onlyLacksMemory reports whether a lack of memory is the only known reason why the members are pending.
func (r *run) onlyLacksMemory(now time.Time) bool {
	short := map[string]bool{} // By template; members with volumes have one each.
	for _, m := range r.ordered() {
		if m.ShortOfMemory && m.counted == pending {
			short[m.Template] = true
		}
	}
	return !slices.ContainsFunc(r.needed().members, func(m *member) bool {
		o := r.offers[m.Template]
		return !short[m.Template] && (r.wait != reasons.GroupNoRoom || o == nil || now.Sub(o.at) > offerLifetime)
	})
}

// starvationRequests returns the requests of the members that the run still needs, with all their eligible nodes.
func (mgr *Manager) starvationRequests(r *run) (requests []ledger.Request) {
	for _, m := range r.needed().members {
		if m.Request > 0 {
			requests = append(requests, ledger.Request{Pod: m.Pod, Nodes: mgr.EligibleNodes(m.UID)})
		}
	}
	return requests
}

// sampleStarvation adds what the reservation kept from others since the last sample.
func (mgr *Manager) sampleStarvation(now time.Time) {
	s := &mgr.starvation
	s.cost += account(float64(mgr.Ledger.StarvationIdle()) * now.Sub(s.sampled).Seconds())
	s.sampled = now
}

// endStarvation ends the starvation reservation, if there is one.
func (mgr *Manager) endStarvation(now time.Time) {
	s := &mgr.starvation
	r := s.run
	if r == nil {
		return
	}
	if r.plan == nil {
		mgr.sampleStarvation(now)
		mgr.refillBudget(now)
		mgr.budget.charge(s.cost)
	}
	mgr.Ledger.SetReservations(ledger.Starving)
	s.next, s.run = now.Add(now.Sub(s.begun)), nil
	if r.plan == nil && !r.removed {
		r.starvedAt = now
		mgr.reorder(r)
	}
}

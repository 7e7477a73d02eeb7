package gang

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// plan holds the node of each member that the gang needs, and the state of the barrier at their binds.
type plan struct {
	members map[gpu.PodUID]*plannedMember
	expires time.Time
	// opened is when the barrier opened; zero before.
	opened time.Time
	// last is the member that is bound after all others, and marks the gang as whole.
	last gpu.PodUID
	// firstArrival is when the first member arrived in this round.
	firstArrival time.Time
	// maxArrived is the largest number of members that arrived in a round. progress is true if the latest round set it.
	maxArrived int
	progress   bool
}

// plannedMember is a member's part of a plan.
type plannedMember struct {
	// node is the planned node; empty for a member that only kube-scheduler can place.
	node string
	// reserved is true if the plan made the reservation and must release it when the plan is dropped. Once the permit
	// is granted, the reservation belongs to the bind.
	reserved bool
	permit   *Permit
	// bindDone is true once the bind has ended, bound if it succeeded.
	bindDone, bound bool
	// late is true if the member had not arrived when the others timed out, and has not been retried since.
	late bool
}

func (p *plan) isOpen() bool { return !p.opened.IsZero() }

// arrived counts the members whose binds are held.
func (p *plan) arrived() (n int) {
	for _, pm := range p.members {
		if pm.permit != nil {
			n++
		}
	}
	return n
}

// hasWholeCards reports whether only kube-scheduler can place a member of the plan, because it asks for whole cards.
func (p *plan) hasWholeCards() bool {
	for _, pm := range p.members {
		if pm.node == "" {
			return true
		}
	}
	return false
}

const (
	// noRoomMin is how long "no room" holds even if memory is freed: a gang's members all ask within milliseconds.
	noRoomMin = 200 * time.Millisecond
	// noRoomMax is how long it holds if no memory is freed. Nodes can become eligible for other reasons.
	noRoomMax = 2 * time.Second
)

// recentlyNoRoom reports whether the latest "no room" still holds.
func (g *gang) recentlyNoRoom(freed uint64, now time.Time) bool {
	ago := now.Sub(g.noRoomAt)
	return !g.noRoomAt.IsZero() && (ago < noRoomMin || g.noRoomFreed == freed && ago < noRoomMax)
}

// makePlan plans all members that the gang still needs, or returns the reason why it can't. The caller holds the lock.
func (mgr *Manager) makePlan(g *gang, counts memberCounts, now time.Time) (Reason, bool) {
	freed := mgr.freed.Load()
	if g.recentlyNoRoom(freed, now) || !mgr.mayPlan(g, freed, now) {
		return NoRoom, false
	}
	g.plannedFreed = freed
	chosen, ok := g.selectMembers(counts, g.hasCandidates)
	if !ok {
		return AwaitsOthers, false
	}
	requests, requesters := g.requests(chosen, func(m *member) []string { return g.candidates[m.Template] })
	if len(requests) < len(chosen) && !mgr.acquireWholeCards(g, now) {
		return OlderFirst, false
	}
	younger := mgr.yieldingGangs(g)
	yielding := make([][]gpu.PodUID, len(younger))
	for i, o := range younger {
		for uid, pm := range o.plan.members {
			if pm.reserved {
				yielding[i] = append(yielding[i], uid)
			}
		}
	}
	reservations, yielded := mgr.Ledger.ReserveAll(requests, yielding, mgr.View, nil, now)
	if reservations == nil && len(requests) > 0 {
		g.noRoomAt, g.noRoomFreed = now, freed
		return NoRoom, false
	}
	for _, o := range younger[:yielded] {
		mgr.dropPlan(o, GaveWay, now, false)
	}
	p := &plan{members: make(map[gpu.PodUID]*plannedMember, len(chosen)), expires: now.Add(mgr.Patience)}
	for _, m := range chosen {
		p.members[m.UID] = &plannedMember{}
	}
	for i, m := range requesters {
		p.members[m.UID].node, p.members[m.UID].reserved = reservations[i].Node, !reservations[i].Existing
	}
	g.plan, g.noRoomAt = p, time.Time{}
	for _, m := range chosen {
		if m.rejected {
			mgr.requeue(cmp.Or(p.members[m.UID].node, anyOf(g.candidates[m.Template])))
			break
		}
	}
	return Reason{}, true
}

const (
	// quietPeriod is how long no memory must be freed before a gang is planned although another one that goes first has
	// no room. maxBurst bounds the wait for that.
	quietPeriod = 300 * time.Millisecond
	maxBurst    = time.Second
)

// freeBurst tracks a burst of freed memory: the pods of a gang that ends terminate one after another.
type freeBurst struct {
	count uint64
	// since is when the burst began, zero if it is over; last is when freed memory was last observed.
	since, last time.Time
}

// observe takes the value of Manager.freed and reports whether the burst is over. A quiet period between two calls that
// both see more freed memory goes unnoticed, therefore a burst counts as over after maxBurst at the latest.
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
	return now.Sub(f.since) >= maxBurst
}

// mayPlan reports whether all gangs that go before g have been tried. Otherwise a small gang would take memory that a
// large one is about to get, and give way a moment later when its first members have arrived, which costs both gangs
// seconds.
func (mgr *Manager) mayPlan(g *gang, freed uint64, now time.Time) bool {
	over := mgr.burst.observe(freed, now)
	for _, o := range mgr.queue {
		switch {
		case o == g, o.plan != nil, o.readySince.IsZero(), len(o.candidates) == 0, mgr.gangs[o.key] != o:
			continue
		case !before(o, g):
			return true
		case !over, o.plannedFreed != freed && !o.recentlyNoRoom(freed, now):
			return false // The next Tick tries all of them in their order.
		}
	}
	return true
}

// hasCandidates reports whether the candidate nodes of the member are known.
func (g *gang) hasCandidates(m *member) bool {
	_, known := g.candidates[m.Template]
	return known
}

// selectMembers returns the pending members to place, of those that are eligible; false if they are too few.
func (g *gang) selectMembers(counts memberCounts, eligible func(*member) bool) ([]*member, bool) {
	chosen := g.sorted(func(m *member) bool { return m.pending() && eligible(m) })
	need := g.size - counts.running - counts.succeeded
	if len(chosen) < need {
		return nil, false
	}
	chosen = chosen[:need]
	// Large requests first, since fewer cards fit them; members of one template in sequence.
	slices.SortStableFunc(chosen, func(a, b *member) int {
		return cmp.Or(cmp.Compare(b.Request, a.Request), strings.Compare(a.Template, b.Template))
	})
	return chosen, true
}

// requests returns the requests of those members that the ledger places, and these members.
func (g *gang) requests(chosen []*member, nodes func(*member) []string) (requests []ledger.Request, requesters []*member) {
	for _, m := range chosen {
		if m.Request > 0 {
			requests, requesters = append(requests, ledger.Request{Pod: m.Pod, Nodes: nodes(m)}), append(requesters, m)
		}
	}
	return requests, requesters
}

// yieldingGangs returns the gangs whose plans give way to a plan of g, in the order in which they do.
func (mgr *Manager) yieldingGangs(g *gang) []*gang {
	var gangs []*gang
	for _, o := range mgr.gangs {
		if o != g && o.plan != nil && !o.plan.isOpen() && before(g, o) {
			gangs = append(gangs, o)
		}
	}
	slices.SortFunc(gangs, func(a, b *gang) int { return compareGangs(b, a) })
	return gangs
}

// acquireWholeCards reports whether g may make a plan with whole cards, and drops such plans of gangs that go after it.
// The ledger doesn't count whole cards, so only one such gang gathers at a time: two of them could each take the half
// that the other one needs.
func (mgr *Manager) acquireWholeCards(g *gang, now time.Time) bool {
	for _, o := range mgr.gangs {
		if o == g || o.plan == nil || o.plan.isOpen() || !o.plan.hasWholeCards() {
			continue
		}
		if before(o, g) {
			return false
		}
		mgr.dropPlan(o, GaveWay, now, false)
	}
	return true
}

// dropPlan drops a plan whose barrier hasn't opened. A gang at fault backs off. The caller holds the lock.
func (mgr *Manager) dropPlan(g *gang, reason Reason, now time.Time, atFault bool) {
	p := g.plan
	if p == nil || p.isOpen() {
		return
	}
	g.plan, g.needsRequeue = nil, true
	mgr.rejectHeld(p, reason)
	for uid, pm := range p.members {
		if pm.reserved {
			mgr.Release(uid)
		}
	}
	if atFault {
		mgr.backOff(g, now)
	}
	mgr.Observer.GangFailed(reason.Label)
}

// timeOut rejects the held binds after Hold. The reservations remain and the members are retried together. The plan
// doesn't expire while each round brings more members.
func (mgr *Manager) timeOut(p *plan, now time.Time) {
	arrived := p.arrived()
	if p.progress = arrived > p.maxArrived; p.progress {
		p.maxArrived, p.expires = arrived, now.Add(mgr.Patience)
	}
	for _, pm := range p.members {
		pm.late = pm.permit == nil
	}
	mgr.Observer.GangFailed(TimedOut.Label)
	mgr.rejectHeld(p, TimedOut)
}

// rejectOnceMore reports whether a late member must be rejected again, so that it returns right behind the members that
// timed out without it. If kube-scheduler takes longer than Hold for all pending pods, it would otherwise be held now
// and time out before the others return, and so on alternately.
func (mgr *Manager) rejectOnceMore(p *plan, pm *plannedMember, now time.Time) bool {
	if !pm.late {
		return false
	}
	pm.late = false
	if p.progress {
		p.expires = now.Add(mgr.Patience)
	}
	return p.arrived() == 0
}

// rejectHeld rejects the held binds.
func (mgr *Manager) rejectHeld(p *plan, reason Reason) {
	for _, pm := range p.members {
		if pm.permit != nil {
			pm.permit.reject(reason)
			pm.permit = nil
		}
	}
}

const (
	minBackoff = time.Second
	maxBackoff = 30 * time.Second
)

// backOff delays the next round, by more after each failure.
func (mgr *Manager) backOff(g *gang, now time.Time) {
	g.notBefore = now.Add(min(minBackoff<<min(g.failures, 10), maxBackoff))
	g.failures++
}

func anyOf(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return names[0]
}

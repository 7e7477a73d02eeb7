package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Permit is the decision about one bind call of a member: granted or rejected.
type Permit struct {
	// Decided is closed once the permit is granted or rejected. The methods may be called only after that.
	Decided   chan struct{}
	reason    *Reason
	opened    time.Time
	markWhole bool
	gang      *gang
	deadline  time.Time
}

// Rejection returns the reason why the bind is rejected, or nil if the permit is granted.
func (p *Permit) Rejection() *Reason { return p.reason }

// OpenedAt returns when the barrier opened. The bind timeout counts from then.
func (p *Permit) OpenedAt() time.Time { return p.opened }

// Run returns the run's identity, which the Binding writes to the pod.
func (p *Permit) Run() string { return "" }

// MarkWhole reports whether the Binding must mark the gang as whole: all other members that the gang needs are bound.
func (p *Permit) MarkWhole() bool { return p.markWhole }

func (p *Permit) reject(reason Reason) {
	p.reason = &reason
	close(p.Decided)
}

func (p *Permit) grant(opened time.Time, markWhole bool) {
	p.opened, p.markWhole = opened, markWhole
	close(p.Decided)
}

// RequestPermit handles a bind call for the pod on the node. It returns a permit to wait for, or nil and the reason why
// the pod can't be bound.
func (mgr *Manager) RequestPermit(uid gpu.PodUID, node string, now time.Time) (*Permit, *Reason) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil {
		return nil, &Unknown
	}
	g := mgr.gangs[m.Gang]
	g.updateState(now)
	permit := &Permit{Decided: make(chan struct{}), gang: g, deadline: now.Add(mgr.Hold)}
	if m.Cardless {
		permit.grant(now, false)
		return permit, nil
	}
	if reason := mgr.invalid(g, m); reason != nil {
		return nil, reason
	}
	if g.whole {
		permit.grant(now, true)
		return permit, nil
	}
	var pm *plannedMember
	if g.plan != nil {
		pm = g.plan.members[uid]
	}
	switch {
	case g.binding():
		return nil, &Binding
	case pm == nil, pm.node != "" && pm.node != node:
		return nil, &Changed
	}
	if pm.permit != nil {
		pm.permit.reject(Changed) // kube-scheduler abandoned the earlier call.
	}
	if g.plan.arrived() == 0 {
		g.plan.firstArrival = now
	}
	pm.permit = permit
	if g.plan.arrived() == len(g.plan.members) {
		mgr.openBarrier(g, now)
	}
	return permit, nil
}

// openBarrier grants the held permits, except one: the last member is bound after all others, so that its Binding can
// mark the gang as whole.
func (mgr *Manager) openBarrier(g *gang, now time.Time) {
	p := g.plan
	for uid, pm := range p.members {
		if pm.node != "" && !mgr.Ledger.StillUsable(uid) {
			mgr.dropPlan(g, PlaceLost, now, true)
			return
		}
	}
	p.opened = now
	mgr.Observer.GangHeld(now.Sub(p.firstArrival))
	for uid := range p.members {
		p.last = max(p.last, uid)
	}
	for uid, pm := range p.members {
		if uid != p.last {
			pm.permit.grant(now, false)
			pm.permit, pm.reserved = nil, false
		}
	}
	mgr.advance(g, now)
}

// advance continues a plan whose barrier is open. Once the binds of all members but the last have ended, it grants or
// rejects the last one's permit; once that bind has ended too, it finishes the plan.
func (mgr *Manager) advance(g *gang, now time.Time) {
	p := g.plan
	bound := 0
	for uid, pm := range p.members {
		switch {
		case uid != p.last && !pm.bindDone:
			return
		case pm.bound:
			bound++
		}
	}
	last := p.members[p.last]
	switch {
	case last.bindDone:
		mgr.finishPlan(g, bound, now)
	case last.permit == nil:
		// Its bind is in flight.
	case bound == len(p.members)-1:
		last.permit.grant(p.opened, true)
		last.permit, last.reserved = nil, false
	default:
		last.permit.reject(NotBound)
		last.permit = nil
		if last.reserved {
			mgr.Release(p.last)
		}
		mgr.finishPlan(g, bound, now)
	}
}

// CancelPermit handles a bind call that ended while its permit was pending. It reports whether the bind is cancelled.
// Otherwise the permit was granted meanwhile, or will be decided soon because the other members' binds are in flight:
// the caller must wait for Decided.
func (mgr *Manager) CancelPermit(uid gpu.PodUID, permit *Permit) bool {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	select {
	case <-permit.Decided:
		return permit.reason != nil
	default:
	}
	if permit.gang.binding() {
		return false
	}
	// A pending permit always belongs to a planned member.
	permit.gang.plan.members[uid].permit = nil
	permit.reject(Changed)
	return true
}

// BindDone records the result of a bind whose permit was granted.
func (mgr *Manager) BindDone(key Key, uid gpu.PodUID, node string, result BindResult, markedWhole bool, now time.Time) {
	ok := result == BindSucceeded
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	g := mgr.gangs[key]
	if g == nil {
		return // All members were removed.
	}
	if m := g.members[uid]; m != nil && ok && m.Node == "" {
		m.Node, m.MarkedWhole, m.bound = node, markedWhole, true
	}
	g.membersChanged()
	if !g.binding() || g.plan.members[uid] == nil {
		return
	}
	pm := g.plan.members[uid]
	pm.bindDone, pm.bound = true, ok
	mgr.advance(g, now)
}

// finishPlan ends a plan whose binds have all ended.
func (mgr *Manager) finishPlan(g *gang, bound int, now time.Time) {
	p := g.plan
	g.plan, g.candidates, g.needsRequeue = nil, nil, true
	if bound == len(p.members) {
		g.whole, g.partial, g.failures = true, false, 0
		mgr.effects.WholePriorities = append(mgr.effects.WholePriorities, g.priority())
		mgr.Observer.GangBound()
		mgr.recordEvent(g, false, EventBound, "All members of the group are bound")
		mgr.removeIfEmpty(g)
		return
	}
	g.partial = !g.whole
	mgr.backOff(g, now)
	mgr.Observer.GangFailed(NotBound.Label)
	mgr.recordEvent(g, true, EventNotBound, "Not all members of the group could be bound")
	g.updateState(now)
	mgr.removeIfEmpty(g)
}

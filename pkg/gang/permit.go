package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Permit is the decision about one bind call of a member: granted or rejected. Once Decided is closed, the exported fields don't
// change any more, and may be read.
type Permit struct {
	Decided chan struct{}
	// Rejection is why the bind is rejected; nil if the permit is granted.
	Rejection *reasons.Group
	// OpenedAt is when the barrier opened, or later, when the last member's call arrived. The bind timeout counts from then.
	OpenedAt time.Time
	// Run is the run's identity, which the Binding writes to the pod; empty if it has none.
	Run string
	// MarkWhole is true if the Binding must mark the run as whole: all other members that it needs are bound.
	MarkWhole bool

	run *run
}

func (p *Permit) reject(reason reasons.Group) {
	p.Rejection = &reason
	close(p.Decided)
}

func (p *Permit) grant(opened time.Time, markWhole bool) {
	p.OpenedAt, p.MarkWhole = opened, markWhole
	if p.run != nil {
		p.Run = p.run.id
	}
	close(p.Decided)
}

// RequestPermit handles a bind call for the pod on the node. It returns a permit to wait for.
func (mgr *Manager) RequestPermit(uid gpu.PodUID, node string, now time.Time) *Permit {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	permit, m := &Permit{Decided: make(chan struct{})}, mgr.members[uid]
	if m == nil {
		permit.reject(reasons.GroupUnknown)
		return permit
	}
	permit.run = m.run
	switch pm := m.place; {
	case m.Cardless:
		permit.grant(now, false)
	case !mgr.leading:
		permit.reject(reasons.GroupStarting)
	case m.run.phase == PhaseRunning:
		permit.grant(now, true)
	case m.run.plan == nil:
		permit.reject(mgr.reason(m.run, m))
	case pm == nil, pm.node != "" && pm.node != node:
		permit.reject(reasons.GroupChanged)
	case pm.state >= memberBinding:
		permit.reject(reasons.GroupBinding)
	default:
		mgr.arrive(pm, permit, now)
	}
	return permit
}

// arrive lets a bind call wait for its permit, and continues the run if all have arrived that it waits for.
func (mgr *Manager) arrive(pm *plannedMember, permit *Permit, now time.Time) {
	r, p := pm.run, pm.run.plan
	if p.isOpen() {
		p.opened = now // The call that waited when the barrier opened was cancelled.
	}
	if pm.permit != nil {
		pm.permit.reject(reasons.GroupChanged) // kube-scheduler abandoned the earlier call.
	}
	if p.count[memberArrived] == 0 {
		p.firstArrived = now
	}
	pm.permit = permit
	p.set(pm, memberArrived)
	switch kept := mgr.keepPlace(pm, now); {
	case !kept:
	case p.isOpen():
		mgr.advance(r, now)
	case p.count[memberArrived] == len(p.members):
		mgr.openBarrier(r, now)
	}
}

// rejectOne rejects the bind call of a member, which is expected again.
func (p *plan) rejectOne(pm *plannedMember, reason reasons.Group) {
	pm.permit.reject(reason)
	pm.permit, pm.passed = nil, false
	p.set(pm, memberExpected)
}

// grant grants the permit of a member.
func (p *plan) grant(pm *plannedMember, opened time.Time, markWhole bool) {
	pm.permit.grant(opened, markWhole)
	pm.permit = nil
	p.set(pm, memberBinding)
}

// rejectArrived rejects the bind calls that wait.
func (p *plan) rejectArrived(reason reasons.Group) {
	for _, pm := range p.members {
		if pm.state == memberArrived {
			p.rejectOne(pm, reason)
		}
	}
}

// keepPlace moves the member to another card of its node if its card is missing, unhealthy or over-full. If none has room, it ends the plan and
// returns false.
func (mgr *Manager) keepPlace(pm *plannedMember, now time.Time) bool {
	if pm.node == "" || mgr.Ledger.StillUsable(pm.UID) || mgr.movePlace(pm, []string{pm.node}, now) {
		return true
	}
	if r := pm.run; r.plan.isOpen() {
		mgr.failLast(r, reasons.GroupPlaceLost, now)
	} else {
		mgr.abandonPlan(r, reasons.GroupPlaceLost, now)
	}
	return false
}

// keepPlaces is keepPlace for all members of a plan whose barrier hasn't opened.
func (mgr *Manager) keepPlaces(r *run, now time.Time) bool {
	for _, pm := range r.plan.members {
		if !mgr.keepPlace(pm, now) {
			return false
		}
	}
	return true
}

// openBarrier grants all permits except one: the last member is bound after all others, so that its Binding can
// mark the run as whole.
func (mgr *Manager) openBarrier(r *run, now time.Time) {
	p := r.plan
	if !mgr.keepPlaces(r, now) {
		return
	}
	if r.id == "" || r.counts[bound] == 0 {
		r.id = string(p.members[0].UID)
	}
	p.opened = now
	mgr.move(r, PhaseBinding, now)
	mgr.Observer.BarrierOpened(now.Sub(p.firstArrived))
	p.last = p.members[len(p.members)-1]
	for _, pm := range p.members {
		if pm != p.last {
			p.grant(pm, now, false)
		}
	}
	mgr.advance(r, now)
}

// timeOut rejects the bind calls that have waited for Hold. If more members arrived than the last time, the reservations stay and the members are
// retried together, until twice the patience has passed. Otherwise the plan has failed.
func (mgr *Manager) timeOut(r *run, now time.Time) {
	p := r.plan
	if p.count[memberArrived] <= p.mostArrived || now.Sub(p.made) >= 2*mgr.Patience {
		mgr.abandonPlan(r, reasons.GroupTimedOut, now)
		return
	}
	p.mostArrived = p.count[memberArrived]
	for _, pm := range p.members {
		if pm.state == memberExpected && !r.key.Native { // kube-scheduler tries a native group in one cycle, which a rejection ends.
			p.set(pm, memberLate)
		}
	}
	mgr.Observer.GangFailed(reasons.GroupTimedOut)
	p.rejectArrived(reasons.GroupTimedOut)
	mgr.extend(r, now)
}

// takeLate makes a late member an expected one, and reports whether filter must reject it once more. The members whose bind calls timed out are back
// in kube-scheduler's queue. If the late member passed now, its bind call could wait alone and time out before the others return. Then the
// calls of the others would time out without it, and so on. So the late member is rejected, unless another member has arrived already. Then all
// return at the same time.
func (mgr *Manager) takeLate(pm *plannedMember, now time.Time) bool {
	if pm.state != memberLate {
		return false
	}
	r := pm.run
	r.plan.set(pm, memberExpected)
	mgr.extend(r, now)
	return r.plan.count[memberArrived] == 0
}

// extend makes the plan's reservations last until the patience after the given time. For a native group whose barrier hasn't opened, they last
// until ledger.TentativeLifetime after that time, but at most until the patience after the plan was made.
func (mgr *Manager) extend(r *run, from time.Time) {
	p := r.plan
	p.expires = from.Add(mgr.Patience)
	if r.key.Native && !p.isOpen() {
		p.expires = p.made.Add(min(from.Sub(p.made)+ledger.TentativeLifetime, mgr.Patience))
	}
}

// CancelPermit handles a bind call that ended while its permit was pending. It reports whether the bind is cancelled.
// Otherwise the permit was granted meanwhile.
func (mgr *Manager) CancelPermit(uid gpu.PodUID, permit *Permit, now time.Time) bool {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	select {
	case <-permit.Decided:
		return permit.Rejection != nil
	default:
	}
	r := permit.run
	r.plan.rejectOne(mgr.members[uid].place, reasons.GroupChanged) // A pending permit always belongs to a planned member.
	if r.plan.isOpen() {
		mgr.extend(r, now)
	}
	return true
}

// Bound records that a bind whose permit was granted has bound the pod to the node. If the pod isn't in the run of the permit any more, what the
// watch reports counts.
func (mgr *Manager) Bound(uid gpu.PodUID, node string, permit *Permit, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil || m.run == nil || m.run != permit.run || m.Node != "" {
		return
	}
	next := m.Member
	next.Node, next.Run, next.MarkedWhole = node, permit.Run, permit.MarkWhole
	mgr.apply(m, next, now)
}

// NotBound records that the pod isn't bound, and that no bind of it has an effect any more. After a bind that neither Bound nor NotBound has
// reported, the outcome follows by one of them, or by Confirmed, ConfirmedGone, SetMember or RemoveMember.
func (mgr *Manager) NotBound(uid gpu.PodUID, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil || m.run == nil || m.run.phase != PhaseBinding {
		return
	}
	if m.place != nil && m.place.state == memberBinding { // Else the bind began before the plan.
		mgr.recordOutcome(m.run, m.place, false, now)
	}
}

// bindSeen records the outcome of a bind, if a change of the member shows it. The barrier of the run is open, and the member may have left the
// run.
func (mgr *Manager) bindSeen(r *run, m *member, now time.Time) {
	switch pm := m.place; {
	case pm == nil, pm.state >= memberBound:
	case m.Node != "":
		mgr.recordOutcome(r, pm, true, now)
	case m.run == r:
		// The pod isn't bound yet. A terminating pod can still become bound, if its bind was faster than its deletion.
	case pm.state == memberBinding:
		mgr.recordOutcome(r, pm, false, now)
	default:
		mgr.failLast(r, reasons.GroupDeleted, now)
	}
}

// recordOutcome records whether a member is bound.
func (mgr *Manager) recordOutcome(r *run, pm *plannedMember, isBound bool, now time.Time) {
	if pm.state == memberArrived { // Another bind than this one has bound the last member: this one finds that out.
		r.plan.grant(pm, now, false)
	}
	if isBound {
		r.plan.set(pm, memberBound)
	} else {
		r.plan.set(pm, memberFailed)
	}
	mgr.advance(r, now)
}

// advance continues a run whose barrier is open. Once the binds of all members but the last are decided, it grants or
// rejects the last one's permit; once that is decided too, the plan ends.
func (mgr *Manager) advance(r *run, now time.Time) {
	p := r.plan
	last := p.last
	switch {
	case p.count[memberBinding] > 0:
	case p.count[memberBound] == len(p.members):
		mgr.becomeWhole(r, now)
	case last.state >= memberBound:
		mgr.abandonPlan(r, reasons.GroupNotBound, now)
	case p.count[memberFailed] > 0:
		mgr.failLast(r, reasons.GroupNotBound, now)
	case last.state == memberArrived:
		p.grant(last, p.opened, true)
	}
}

// failLast gives up the last member of a run whose barrier is open, and with it the plan.
func (mgr *Manager) failLast(r *run, reason reasons.Group, now time.Time) {
	last := r.plan.last
	r.plan.rejectArrived(reason)
	if last.node != "" {
		mgr.Release(last.UID)
	}
	mgr.recordOutcome(r, last, false, now)
}

package gang

import (
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// plan holds the node of each member that the run needs, and the state of the barrier at their binds.
type plan struct {
	members map[gpu.PodUID]*plannedMember
	// order are the members, the oldest first.
	order   []gpu.PodUID
	attempt queue.Attempt
	// made is when the places were reserved.
	made    time.Time
	expires time.Time
	// wholeCards is true if only kube-scheduler can place a member, because it asks for whole cards.
	wholeCards bool
	// opened is when the barrier opened; zero before.
	opened time.Time
	// last is the member that is bound after all others, and marks the run as whole. undecided counts the members other than
	// last for which it isn't known yet whether they were bound. bound counts the members, last included, that were bound.
	last             gpu.PodUID
	undecided, bound int
	// held counts the members whose binds are held, firstHeld is since when one is.
	held      int
	firstHeld time.Time
	// maxHeld is the largest number of members that were held when a hold ended.
	maxHeld int
}

// plannedMember is a member's part of a plan.
type plannedMember struct {
	// node is the planned node; empty for a member that only kube-scheduler can place.
	node string
	// reserved is true if the plan made the reservation and must release it when the plan is dropped. Once the permit
	// is granted, the reservation belongs to the bind.
	reserved bool
	permit   *Permit
	// granted is true once the permit is granted. It is also true for a last member that was given up: it gets no permit any more.
	granted bool
	// decided is true once it is known whether the granted bind succeeded.
	decided bool
	// unconfirmed is true if the answer to the bind was lost.
	unconfirmed bool
	// late is true if the member had not arrived when the others timed out, and kube-scheduler has not retried it since.
	late bool
}

// all yields the members in their order.
func (p *plan) all() iter.Seq2[gpu.PodUID, *plannedMember] {
	return func(yield func(gpu.PodUID, *plannedMember) bool) {
		for _, uid := range p.order {
			if !yield(uid, p.members[uid]) {
				return
			}
		}
	}
}

// usesAny reports whether a member's place is on one of the nodes.
func (p *plan) usesAny(nodes map[string]bool) bool {
	for _, pm := range p.members {
		if pm.reserved && nodes[pm.node] {
			return true
		}
	}
	return false
}

func (p *plan) isOpen() bool { return !p.opened.IsZero() }

// makePlan plans all members that the run still needs, or returns the reason why it can't.
func (mgr *Manager) makePlan(r *run, now time.Time) (reasons.Group, bool) {
	freed := mgr.freed.Load()
	if r.noRoom.holdsFor(r, freed, now) { // Before all that takes longer for more members.
		return reasons.GroupNoRoom, false
	}
	n := r.needed()
	if r.key.Native {
		mgr.offerEligible(r, n, now)
	}
	switch {
	case !n.allOffered(r) && r.key.Native:
		r.wait = reasons.GroupNoRoom
		return r.wait, false
	case !r.settled(now): // Others of its members keep this message until they are tried again, so it must stay true.
		r.wait = reasons.GroupUnclear
		return r.wait, false
	case !n.allOffered(r), n.any(mgr.AwaitsTurn):
		r.wait = reasons.GroupAwaitsOthers
		return r.wait, false
	case n.wholeCards && slices.ContainsFunc(mgr.placed, func(o *run) bool { return o.plan.wholeCards && !r.takesFrom(o) }):
		r.wait = reasons.GroupOlderFirst
		return r.wait, false
	}
	n.build(r)
	places, ok := mgr.reserve(r, n, freed, now)
	if !ok {
		r.wait = reasons.GroupNoRoom
		return r.wait, false
	}
	if n.wholeCards {
		mgr.endWholeCards(now)
	}
	p := &plan{
		members: make(map[gpu.PodUID]*plannedMember, len(n.members)),
		attempt: mgr.attempt(r), made: now, wholeCards: n.wholeCards,
	}
	mgr.Failures.Placed(p.attempt)
	r.plan, r.wait, r.noRoom = p, reasons.Group{}, noRoom{}
	for _, m := range n.members {
		p.members[m.UID], p.order = &plannedMember{}, append(p.order, m.UID)
	}
	for i, m := range n.requesters {
		p.members[m.UID].reserved = !places[i].Existing
		mgr.setPlace(m.UID, p.members[m.UID], places[i].Node)
	}
	mgr.move(r, placesReserved, PhasePlanned, now)
	mgr.extend(r, now)
	if !r.key.Native { // Its filter calls follow.
		mgr.requeueParked(r)
	}
	return reasons.Group{}, true
}

// mayDisplace reports whether the run may take memory from others. One whose shape failed takes none until a run of this shape is bound: it would
// take the same memory again and again.
func (r *run) mayDisplace() bool { return r.failures == 0 }

// takesFrom reports whether r may end the plan of another run to get its memory. A broken run ends none that is older than the break: runs that
// break again and again must not keep others from running.
func (r *run) takesFrom(o *run) bool {
	return r.mayDisplace() && r.item.Before(&o.item) && (!r.item.Broken || !o.plan.made.Before(r.brokeAt))
}

// reserve reserves memory for the requests. Places that fair sharing has granted to the members are used if their nodes are candidates, and otherwise
// exchanged, if there is room. Plans of runs that r takes from give way, from the last, but no more than needed.
func (mgr *Manager) reserve(r *run, n *needs, freed uint64, now time.Time) ([]ledger.Place, bool) {
	if len(n.requests) == 0 {
		return nil, true
	}
	granted := map[gpu.PodUID]bool{}
	for _, m := range n.requesters {
		if mgr.Ledger.Owns(ledger.Granted, m.UID) {
			granted[m.UID] = true
		}
	}
	// If a run found no room, a run of the same likeness behind it finds none either: fewer runs give way to it.
	alone := len(granted) > 0 || mgr.Ledger.Awaits(n.requests[0].Pod.UID) // Only r sees the memory that is reserved for it.
	like := likeRuns{n.likeness, r.mayDisplace()}
	if last, found := mgr.noRoomFor[like]; found && !alone && last.holdsFor(r, freed, now) {
		r.noRoom = last
		return nil, false
	}
	mgr.work += len(n.requests)
	// A run got its turn because there was room, and priorities count within a tenant only. But members that run must not be evicted.
	mayTake := r.phase == PhaseBroken || !n.any(mgr.NeedsTurn)
	younger, yielding := mgr.yielding(func(o *run) bool { return mayTake && r.takesFrom(o) })
	if len(granted) > 0 { // Its own places give way first.
		younger, yielding = slices.Insert(younger, 0, nil), slices.Insert(yielding, 0, slices.Sorted(maps.Keys(granted)))
	}
	capacity := mgr.Capacity()
	places, yielded := mgr.Ledger.ReserveAll(n.requests, yielding, mgr.View, capacity, now)
	if places == nil && n.mixed && capacity != nil {
		// The ledger places one request after the other, the largest first. If CPU is scarce too, it can fail although places for all exist.
		requests := slices.Clone(n.requests)
		slices.Reverse(requests)
		places, yielded = mgr.Ledger.ReserveAll(requests, yielding, mgr.View, capacity, now)
		slices.Reverse(places)
	}
	if places == nil {
		if r.noRoom = (noRoom{r.item, now, freed}); !alone {
			mgr.noRoomFor[like] = r.noRoom
		}
		for _, set := range yielding {
			mgr.work += len(set)
		}
		return nil, false
	}
	for _, o := range younger[:yielded] {
		if o != nil {
			mgr.abandonPlan(o, reasons.GroupGaveWay, now)
		}
	}
	for i, m := range n.requesters {
		places[i].Existing = places[i].Existing && !granted[m.UID] // Otherwise a bind has the place.
	}
	return places, true
}

// yielding returns the runs that pass and whose plans can be dropped, the last in the order first. For each it returns the members whose
// reservations are released with the plan.
func (mgr *Manager) yielding(pass func(*run) bool) (runs []*run, uids [][]gpu.PodUID) {
	for _, r := range slices.Backward(mgr.placed) {
		if !pass(r) {
			continue
		}
		var set []gpu.PodUID
		for uid, pm := range r.plan.all() {
			if pm.reserved {
				set = append(set, uid)
			}
		}
		runs, uids = append(runs, r), append(uids, set)
	}
	return runs, uids
}

// Displace ends plans of runs that have a lower priority than the pod, if the pod then fits one of the nodes: the last in the order first, and
// as few as needed. The pod gets an assumed allocation there, for the patience at most. Displace reports whether it did so. Without the allocation,
// the runs could take the place again before the pod's bind: before it binds the pod, kube-scheduler makes the filter call for its next pod, which
// is often a member of these runs.
func (mgr *Manager) Displace(pod gpu.Pod, nodes []string, now time.Time) bool {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	lower := func(r *run) bool { return r.item.Priority < pod.Priority }
	if pod.Request == 0 || !slices.ContainsFunc(mgr.placed, lower) {
		return false
	}
	nodes = slices.DeleteFunc(slices.Clone(nodes), func(node string) bool { return !mgr.Ledger.HasReserved(node) })
	if !mgr.Ledger.FitsWithoutAssumed(pod, nodes) { // ReserveAll would take long to find that out.
		return false
	}
	candidates := make(map[string]bool, len(nodes))
	for _, node := range nodes {
		candidates[node] = true
	}
	runs, yielding := mgr.yielding(func(r *run) bool { return lower(r) && r.plan.usesAny(candidates) })
	if len(runs) == 0 {
		return false
	}
	places, yielded := mgr.Ledger.ReserveAll([]ledger.Request{{Pod: pod, Nodes: nodes}}, yielding, mgr.View, nil, now)
	if places == nil || places[0].Existing {
		return false
	}
	for _, r := range runs[:yielded] {
		mgr.abandonPlan(r, reasons.GroupGaveWay, now)
	}
	mgr.Ledger.Own(ledger.Displaced, pod.UID, now.Add(mgr.Patience))
	return true
}

// endWholeCards ends the plans with whole cards. The ledger doesn't count whole cards, so only one such run has a plan at a time. Otherwise two
// runs could each take half of the cards that both need.
func (mgr *Manager) endWholeCards(now time.Time) {
	for _, o := range slices.Clone(mgr.placed) {
		if o.plan.wholeCards {
			mgr.abandonPlan(o, reasons.GroupGaveWay, now)
		}
	}
}

// setPlace sets the planned node of a member. An empty node removes its place.
func (mgr *Manager) setPlace(uid gpu.PodUID, pm *plannedMember, node string) {
	if pm.node = node; node == "" {
		mgr.Ledger.Disown(ledger.Planned, uid)
		return
	}
	mgr.Ledger.Own(ledger.Planned, uid, time.Time{})
}

// checkPlan ends the plan of a run whose members don't match it any more.
func (mgr *Manager) checkPlan(r *run, m *member, now time.Time) {
	pm := r.plan.members[m.UID]
	switch {
	case pm != nil && (m.run != r || m.counted != pending):
		mgr.abandonPlan(r, reasons.GroupDeleted, now)
	case r.need() != len(r.plan.members), pm != nil && pm.reserved && mgr.asksElse(m):
		mgr.abandonPlan(r, reasons.GroupChanged, now)
	}
}

// asksElse reports whether the member's place is for another demand than it has now: users can change labels.
func (mgr *Manager) asksElse(m *member) bool {
	_, allocation, placed := mgr.Ledger.Lookup(m.UID)
	return placed && allocation.Demand() != m.Demand()
}

// endPlan removes the plan from the run, and returns it.
func (mgr *Manager) endPlan(r *run) *plan {
	p := r.plan
	r.plan, r.needs = nil, nil
	for uid, pm := range p.members {
		mgr.setPlace(uid, pm, "")
	}
	return p
}

// dropPlan rejects the held binds and releases the reservations of a plan.
func (mgr *Manager) dropPlan(r *run, reason reasons.Group) {
	p := mgr.endPlan(r)
	mgr.rejectHeld(p, reason)
	for uid, pm := range p.all() {
		if pm.reserved {
			mgr.Release(uid)
		}
	}
	mgr.Observer.GangFailed(reason)
}

// abandonPlan ends the plan of a run whose barrier hasn't opened, without success. It has failed if its members didn't arrive or were deleted.
// One that loses its memory to others has not, unless the run had memory for the patience, in all plans since the latest failure.
func (mgr *Manager) abandonPlan(r *run, reason reasons.Group, now time.Time) {
	p := r.plan
	mgr.dropPlan(r, reason)
	r.reservedFor += now.Sub(p.made)
	switch reason {
	case reasons.GroupExpired, reasons.GroupTimedOut, reasons.GroupUnplaced:
		mgr.recordEvent(r, true, EventNotBound, reason.Text())
		mgr.fail(r, p, now)
	case reasons.GroupDeleted:
		mgr.fail(r, p, now)
	default:
		if mgr.Failures.Ended(p.attempt); r.reservedFor >= mgr.Patience {
			mgr.fail(r, p, now)
		}
	}
	mgr.move(r, planDropped, r.rest(), now)
	mgr.rested(r, now)
}

// fail records that a plan has failed. The candidate nodes are dropped, so the next plan needs new filter calls.
func (mgr *Manager) fail(r *run, p *plan, now time.Time) {
	mgr.Failures.Failed(p.attempt, p.made, now)
	r.reservedFor, r.wait = 0, reasons.GroupPaused
	for _, offer := range r.offers {
		offer.nodes = nil
	}
	r.needs = nil
}

// forgive ends the pause of the run's shape. It is called after a change by a user that can make the next plan succeed.
func (mgr *Manager) forgive(r *run) {
	if r.needs = nil; mgr.Failures.Any(r.key.Namespace) {
		mgr.Failures.Forgive(mgr.attempt(r))
	}
}

package gang

import (
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
	// members are the oldest first.
	members []*plannedMember
	profile queue.Profile
	// made is when the places were reserved.
	made    time.Time
	expires time.Time
	// wholeCards is true if only kube-scheduler can place a member, because it asks for whole cards.
	wholeCards bool
	// opened is when the barrier opened, or when the last member's call arrived once more since; zero before.
	opened time.Time
	// last is the member that is bound after all others, and marks the run as whole; nil before the barrier opened.
	last *plannedMember
	// count is the number of members in each state.
	count [memberStates]int
	// firstArrived is since when a bind call waits.
	firstArrived time.Time
	// mostArrived is the largest number of members that had arrived when timeOut rejected them.
	mostArrived int
}

// plannedMember is a member's part of a plan.
type plannedMember struct {
	*member
	// asked is what the place was chosen for: users can change labels.
	asked requirements
	// node is the planned node; empty for a member that only kube-scheduler can place. Its reservation there belongs to the plan until the permit is
	// granted, and then to the bind.
	node  string
	state memberState
	// passed is true if filter has returned the node, and no bind call of the member was rejected since: kube-scheduler may have placed it there.
	passed bool
	// permit is that of the bind call that waits; nil if none does.
	permit *Permit
}

// memberState is how far a planned member has come.
type memberState uint8

const (
	// memberExpected: no bind call of it waits.
	memberExpected memberState = iota
	// memberLate: as memberExpected. It had not arrived when the others timed out, and kube-scheduler has not retried it since.
	memberLate
	// memberArrived: its bind call waits for the other members.
	memberArrived
	// memberBinding: its permit is granted, and it isn't known yet whether it is bound.
	memberBinding
	// memberBound: it is bound.
	memberBound
	// memberFailed: it wasn't bound, and gets no permit any more. The last member fails without a bind if another one has failed.
	memberFailed

	memberStates
)

// set changes the state of a member.
func (p *plan) set(pm *plannedMember, to memberState) {
	p.count[pm.state]--
	p.count[to]++
	pm.state = to
}

func (p *plan) isOpen() bool { return !p.opened.IsZero() }

// mayDisplace reports whether the run may take memory from others. One whose shape failed takes none until a run of this shape is bound: it would
// take the same memory again and again.
func (r *run) mayDisplace() bool { return r.failures == 0 }

// takesFrom reports whether r may end the plan of another run to get its memory. A broken run ends none that is older than the break: runs that
// break again and again must not keep others from running.
func (r *run) takesFrom(o *run) bool {
	return r.mayDisplace() && r.item.Before(&o.item) && (!r.item.CompletesGroup || !o.plan.made.Before(r.brokeAt))
}

// beginPlan makes the plan of a run for whose members the places are reserved.
func (mgr *Manager) beginPlan(r *run, n *needs, places []ledger.ChosenNode, now time.Time) {
	if n.wholeCards {
		mgr.endWholeCards(now)
	}
	p := &plan{profile: mgr.profile(r), made: now, wholeCards: n.wholeCards}
	mgr.Failures.Placed(p.profile)
	r.plan, r.noRoom = p, noRoom{}
	for _, m := range n.members {
		m.place = &plannedMember{member: m, asked: m.requirements()}
		p.members = append(p.members, m.place)
	}
	p.count[memberExpected] = len(p.members)
	for i, m := range n.requesters {
		mgr.setPlace(m.place, places[i].Node)
	}
	mgr.move(r, PhasePlanned, now)
	mgr.extend(r, now)
	if !r.key.Native { // Its filter calls follow.
		mgr.requeueParked(r)
	}
}

// reserve reserves memory for the requests, or returns nil if there is no room. The places that fair sharing has granted to the members are used if
// their nodes are candidates, and otherwise exchanged, if there is room. Plans of runs that r takes from give way.
func (mgr *Manager) reserve(r *run, n *needs, granted []gpu.PodUID, now time.Time) []ledger.ChosenNode {
	if len(n.requests) == 0 {
		return []ledger.ChosenNode{}
	}
	// A run got its turn because there was room, and priorities count within a tenant only. But members that run must not be evicted.
	mayTake := r.phase == PhaseBroken || !n.any(mgr.Ledger.NeedsTurn)
	yields := func(o *run) bool { return mayTake && r.takesFrom(o) }
	places := mgr.take(n.requests, granted, yields, now)
	if places == nil && n.mixed {
		// The ledger places one request after the other, the largest first. If CPU is scarce too, it can fail although places for all exist.
		requests := slices.Clone(n.requests)
		slices.Reverse(requests)
		places = mgr.take(requests, granted, yields, now)
		slices.Reverse(places)
	}
	return places
}

// take reserves memory for all requests, or returns nil if there is no room. The granted places give way to that, and then plans of runs that yield, with
// places on nodes that the requests can use: the last in the order first, until there is room.
func (mgr *Manager) take(
	requests []ledger.Request, granted []gpu.PodUID, yields func(*run) bool, now time.Time,
) []ledger.ChosenNode {
	mgr.work += len(requests)
	var runs []*run
	var yielding [][]gpu.PodUID
	if len(granted) > 0 {
		runs, yielding = append(runs, nil), append(yielding, granted)
	}
	planned := mgr.plannedRuns(yields)
	usable := usablePlaces(planned, requests)
	for _, r := range slices.Backward(planned) {
		var set []gpu.PodUID
		helps := false
		for _, pm := range r.plan.members {
			if pm.node != "" {
				set = append(set, pm.UID)
				helps = helps || usable[pm.node]
			}
		}
		if helps {
			runs, yielding = append(runs, r), append(yielding, set)
		}
	}
	places, yielded := mgr.Ledger.ReserveAll(requests, yielding, mgr.View, now)
	if places == nil {
		for _, set := range yielding {
			mgr.work += len(set)
		}
	}
	for _, r := range runs[:yielded] {
		if r != nil {
			mgr.abandonPlan(r, reasons.GroupGaveWay, now)
		}
	}
	return places
}

// plannedRuns returns the planned runs that pass, in order.
func (mgr *Manager) plannedRuns(pass func(*run) bool) []*run {
	return slices.DeleteFunc(slices.SortedFunc(maps.Keys(mgr.planned), compareRank), func(r *run) bool { return !pass(r) })
}

// usablePlaces tells of each node on which one of the runs has a place whether one of the requests can use it.
func usablePlaces(runs []*run, requests []ledger.Request) map[string]bool {
	usable := map[string]bool{}
	for _, r := range runs {
		for _, pm := range r.plan.members {
			usable[pm.node] = false
		}
	}
	var former []string
	for i := 0; i < len(requests) && len(usable) > 0; i++ {
		nodes := requests[i].Nodes
		if len(nodes) == 0 || len(nodes) == len(former) && &nodes[0] == &former[0] { // Most share one slice.
			continue
		}
		former = nodes
		for _, name := range nodes {
			if _, planned := usable[name]; planned {
				usable[name] = true
			}
		}
	}
	return usable
}

// Displace ends plans of runs that have a lower priority than the pod, if the pod then fits one of the nodes. It returns this node, or false. The pod
// has an assumed allocation there, so that no run takes the place again.
func (mgr *Manager) Displace(pod gpu.Pod, nodes []string, now time.Time) (node string, ok bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	lower := func(r *run) bool { return r.item.Priority < pod.Priority }
	usable := usablePlaces(mgr.plannedRuns(lower), []ledger.Request{{Nodes: nodes}})
	nodes = slices.DeleteFunc(slices.Clone(nodes), func(node string) bool { return !usable[node] })
	if pod.Request == 0 || !mgr.Ledger.FitsWithoutAssumed(pod, nodes) { // ReserveAll would take long to find that out.
		return "", false
	}
	places := mgr.take([]ledger.Request{{Pod: pod, Nodes: nodes}}, nil, lower, now)
	if places == nil || places[0].Existing {
		return "", false
	}
	return places[0].Node, true
}

// endWholeCards ends the plans with whole cards. The ledger doesn't count whole cards, so only one such run has a plan at a time. Otherwise two
// runs could each take half of the cards that both need.
func (mgr *Manager) endWholeCards(now time.Time) {
	for o := range mgr.planned { // In any order: it is one at most.
		if o.plan.wholeCards {
			mgr.abandonPlan(o, reasons.GroupGaveWay, now)
		}
	}
}

// setPlace sets the planned node of a member.
func (mgr *Manager) setPlace(pm *plannedMember, node string) {
	pm.node = node
	mgr.Ledger.SetSource(ledger.Planned, pm.UID)
}

// checkPlan ends the plan of a run whose members don't match it any more.
func (mgr *Manager) checkPlan(r *run, m *member, now time.Time) {
	switch pm := m.place; {
	case pm != nil && (m.run != r || m.counted != pending):
		mgr.abandonPlan(r, reasons.GroupDeleted, now)
	case r.lacking() != len(r.plan.members), pm != nil && (pm.asked != m.requirements() || m.Size != r.size()):
		mgr.abandonPlan(r, reasons.GroupChanged, now)
	}
}

// endPlan removes the plan from the run, rejects the bind calls that wait, and releases the reservations that belong to the plan.
func (mgr *Manager) endPlan(r *run, reason reasons.Group) {
	p := r.plan
	r.plan = nil
	p.rejectArrived(reason)
	for _, pm := range p.members {
		pm.place = nil
		mgr.Ledger.ResetSource(ledger.Planned, pm.UID)
		if pm.node != "" && pm.state < memberBinding {
			mgr.Release(pm.UID)
		}
	}
}

// abandonPlan ends the plan of a run without success. No bind of the plan is in flight. The plan has failed if members didn't arrive, were deleted or
// could not be bound. A plan that loses its memory to others has not, unless the run had memory for the patience, in all plans since the latest
// failure.
func (mgr *Manager) abandonPlan(r *run, reason reasons.Group, now time.Time) {
	p := r.plan
	mgr.endPlan(r, reason)
	mgr.Observer.GangFailed(reason)
	r.reservedFor += now.Sub(p.made)
	switch reason {
	case reasons.GroupExpired, reasons.GroupTimedOut, reasons.GroupUnplaced, reasons.GroupNotBound:
		mgr.recordEvent(r, true, EventNotBound, reason.Text())
		mgr.fail(r, p, now)
	case reasons.GroupDeleted:
		mgr.fail(r, p, now)
	default:
		mgr.Failures.Ended(p.profile)
		if r.reservedFor >= mgr.Patience {
			mgr.fail(r, p, now)
		}
	}
	mgr.move(r, r.phaseWithoutPlan(), now)
	mgr.continueWithoutPlan(r, now)
}

// fail records that a plan has failed. The candidate nodes are dropped, so the next plan needs new filter calls.
func (mgr *Manager) fail(r *run, p *plan, now time.Time) {
	mgr.Failures.Failed(p.profile, p.made, now)
	r.reservedFor, r.waitsFor = 0, reasons.GroupPaused
	for template, o := range r.offers {
		r.offers[template] = offer{at: o.at}
	}
	r.needed().requests = nil
}

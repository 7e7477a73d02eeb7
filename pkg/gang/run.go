package gang

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// run is one all-or-nothing start of a group. It exists while it has members, or binds in flight. The Manager's lock
// guards it.
type run struct {
	key Key
	// id is what the members' Bindings write to the annotation gpushare.aliyun.com/group-run; empty before the barrier
	// opened, and for members that were bound without it.
	id      string
	members map[gpu.PodUID]*member
	// order are the members, the oldest first; nil until it is needed. A group can have thousands, of which one changes.
	order []*member
	tally
	phase Phase
	// since is when the run began to be incomplete, to wait for its bind, to run, or to be evicted.
	since time.Time
	// created is when the oldest member was created, even if that member doesn't exist any more.
	created time.Time
	// item is the run as an item of the queue, as of the latest change, see rank. failures is how often runs of its shape have failed since one was bound.
	item     ledger.Item
	failures int

	plan *plan
	// offers are the latest candidate nodes by Member.Template.
	offers map[string]offer
	// needs are the members to place; nil if they must be computed again: see needed.
	needs *needs
	// waitsFor is why the latest attempt to plan failed. noRoom is its result if there was no room: each filter call for a member asks for it.
	waitsFor reasons.Group
	noRoom   noRoom

	// reservedFor is for how long the run had plans since its latest failure.
	reservedFor time.Duration
	// brokeAt is when the run last became broken.
	brokeAt time.Time

	// parked is true if kube-scheduler may have members of the run in its queue of unschedulable pods. These need a requeue.
	parked       bool
	verification verification
	// inherited is true if members were bound by another leader: this process doesn't know whether all were.
	inherited bool
	// reportAt is when it is clear that the run gets no more than the reported number of members; zero once it is.
	reportAt time.Time
	reported int
	// lastEvent is the reason and text of the latest Event.
	lastEvent string
}

// add counts a member n times, see tally.add.
func (r *run) add(m *member, n int) {
	r.tally.add(m, n)
	r.needs = nil
}

// recount makes a change of a member, and updates what the member counts as in its run.
func (m *member) recount(change func()) {
	m.run.add(m, -1)
	change()
	m.counted = m.category()
	m.run.add(m, 1)
}

// waits reports whether the run waits for a plan.
func (r *run) waits() bool { return (r.phase == PhasePending || r.phase == PhaseBroken) && r.enough() }

// phaseWithoutPlan returns the phase of the run if it has no plan and isn't running.
func (r *run) phaseWithoutPlan() Phase {
	switch {
	case r.counts[bound] > 0 && r.phase == PhaseEvicting:
		return PhaseEvicting
	case r.counts[bound] > 0:
		return PhaseBroken
	case r.enough():
		return PhasePending
	}
	return PhaseIncomplete
}

// continueRun continues a run after a change of its member m, which may have left. The change can complete the run, show the outcome of a bind, or end
// the plan; without a plan, it can change the phase. m is nil if something else has changed for a run without a plan.
func (mgr *Manager) continueRun(r *run, m *member, now time.Time) {
	if r.counts[bound] == 0 {
		r.verification = verification{} // If the run is broken later, other members are missing.
	}
	switch {
	case r.phase == PhaseRunning:
		if r.counts[bound] == 0 || r.controllers[""] != nil { // Otherwise it takes the pods that it took before.
			mgr.rehome(r, now)
		}
	case r.whole():
		mgr.becomeWhole(r, now)
	case r.phase == PhaseBinding:
		mgr.bindSeen(r, m, now)
	case r.plan != nil:
		mgr.checkPlan(r, m, now)
	default:
		if to := r.phaseWithoutPlan(); r.phase != to {
			r.inherited = to == PhaseBroken
			mgr.move(r, to, now)
		}
		mgr.continueWithoutPlan(r, now)
	}
	mgr.rank(r)
	mgr.removeIfEmpty(r)
}

// continueWithoutPlan continues a run without a plan, after a change of its members, or of its phase. It begins what due continues.
func (mgr *Manager) continueWithoutPlan(r *run, now time.Time) {
	if r.phase != PhaseEvicting && mgr.placesAlone(r.key) {
		mgr.startRunning(r, now)
		return
	}
	switch r.phase {
	case PhaseIncomplete:
		if n := r.existing(); n != r.reported {
			r.reported, r.reportAt = n, now.Add(mgr.Patience)
		}
	case PhasePending:
		mgr.requeueUnknown(r, now)
	case PhaseBroken:
		if n := r.counts[bound]; n > r.verification.bound { // Otherwise the former verification goes on, after a failed plan.
			r.verification = verification{bound: n, next: now}
		}
		mgr.requeueUnknown(r, now)
	}
}

// becomeWhole moves a run to running: all members are bound.
func (mgr *Manager) becomeWhole(r *run, now time.Time) {
	if p := r.plan; p != nil {
		mgr.Failures.Arrived(p.profile)
		if p.isOpen() && p.last.state == memberArrived {
			p.grant(p.last, now, true)
		}
		mgr.endPlan(r, reasons.GroupChanged)
	}
	r.acceptSurplus()
	mgr.effects.RequeueAbove = append(mgr.effects.RequeueAbove, r.priority())
	mgr.Observer.GangBound()
	mgr.recordEvent(r, false, EventBound, "All members of the group are bound")
	mgr.startRunning(r, now)
}

// startRunning moves a run to running. Its unbound members are placed alone from now on, or belong to the next run.
func (mgr *Manager) startRunning(r *run, now time.Time) {
	mgr.move(r, PhaseRunning, now)
	mgr.requeueParked(r)
	mgr.rehome(r, now)
}

// rank updates the item and the failures of a run, after a change of its phase, members or failures.
func (mgr *Manager) rank(r *run) {
	r.item = ledger.Item{
		ID: r.key.ItemID(), Label: "group " + r.key.String(), CompletesGroup: r.counts[bound] > 0, Priority: r.priority(), Entered: r.created,
	}
	r.failures = 0
	if r.phase.isStarting() && mgr.Failures.HasFailuresIn(r.key.Namespace) {
		var latest time.Time
		r.failures, latest = mgr.Failures.CountOf(mgr.profile(r))
		if latest.After(r.created) {
			r.item.Entered = latest.Truncate(time.Second) // As times of creation are.
		}
	}
}

func compareRank(a, b *run) int { return a.item.Compare(&b.item) }

// unfinished returns the runs that aren't in PhaseRunning, in the order of the queue.
func (mgr *Manager) unfinished() (out []*run) {
	for _, g := range mgr.groups {
		if r := g.unfinishedRun(); r != nil {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, compareRank)
	return out
}

// sorted returns the members that pass, oldest first.
func (r *run) sorted(pass func(*member) bool) []*member {
	var out []*member
	for _, m := range r.ordered() {
		if pass(m) {
			out = append(out, m)
		}
	}
	return out
}

// ordered returns all members, oldest first. It is valid until a member joins or leaves.
func (r *run) ordered() []*member {
	if r.order == nil {
		r.order = slices.SortedFunc(maps.Values(r.members), compareAge)
	}
	return r.order
}

// compareAge orders the members of a run. What it compares never changes, and a member that the watch reports later isn't older than those that
// may have been chosen already.
func compareAge(a, b *member) int {
	return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.serial, b.serial))
}

// recordEvent records an Event on the run's oldest member, unless it repeats the run's latest Event.
func (mgr *Manager) recordEvent(r *run, warning bool, reason, text string) {
	if r.lastEvent == reason+text {
		return
	}
	ordered := r.ordered()
	i := slices.IndexFunc(ordered, func(m *member) bool { return !m.Ended })
	if i < 0 {
		return
	}
	r.lastEvent = reason + text
	mgr.effects.Events = append(mgr.effects.Events, Event{ordered[i].Pod, warning, reason, text})
}

// reportIncomplete continues a run that gets no more members. If its controllers continue an earlier run, its members join that one. Otherwise
// it records an Event. Often the missing members will never be created: by default a StatefulSet creates its next pod only when the previous
// one is ready, and a Job has at most as many pods at a time as its parallelism.
func (mgr *Manager) reportIncomplete(r *run, now time.Time) {
	switch {
	case r.reportAt.IsZero(), now.Before(r.reportAt):
		return
	case r.phase != PhaseIncomplete || r.size() == 0 || r.counts[pending] == 0:
		r.reportAt, r.reported = time.Time{}, 0
		return
	}
	r.reportAt = time.Time{}
	if mgr.continues(r) {
		mgr.requeueParked(r)
		mgr.rehome(r, now)
		mgr.continueRun(r, nil, now)
		return
	}
	mgr.recordEvent(r, true, EventIncomplete, "The group waits: "+mgr.incomplete(r).Words)
}

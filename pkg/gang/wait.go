package gang

import (
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// What a run waits for. One without a plan is tried in filter calls and, unless it is a native group, by each Tick. It waits for, in this order:
//
//   - More members, if too few exist (enough): reasons.GroupIncomplete.
//   - The end of a pause, if it or others of its namespace have failed (updatePause): GroupPaused, GroupBehindFailed.
//   - The end of an earlier result that there is no room (noRoom.appliesTo), because the rest takes longer: GroupNoRoom.
//   - That it is clear which members belong together (obstacle): GroupUnclear.
//   - The turns of all members by fair sharing (obstacle): GroupAwaitsTurn.
//   - Filter calls for the other members, because their candidate nodes are needed (obstacle): GroupAwaitsOthers.
//   - Another run of whole cards (obstacle): GroupOlderFirst.
//   - Room (reserve): GroupNoRoom. If seven of eight members fit, none of them gets a place, and other pods can take the free cards. The run is tried
//     again when memory is freed, every two seconds at least. It is an item of the queue (Waiting): the first item that waits for some nodes gets an
//     awaited reservation, of cards for all eight, free or in use, and others do while the items before have little (queue.Reserver.Pass). Of the
//     cards in use, those with the youngest pods are reserved, if none of these pods is older than the item (Ledger.Await). It is planned as
//     soon as there is room for all eight, on these cards or on others.

const (
	// noRoomMax is how long the result "no room" stays valid if no memory is freed. It is limited, because nodes can become eligible for other
	// reasons. It stays valid for noRoomMin even if memory is freed, because all members of a run are filtered within milliseconds.
	noRoomMax = 2 * time.Second
	noRoomMin = 300 * time.Millisecond
	// maxWork is the number of members that one Tick sorts, or tries to place without success, before it leaves the rest to the
	// next one.
	maxWork = 2000
)

// updatePause sets what the run waits for, and returns true, if it must not be tried because it, or others of its namespace, failed. Once a pause has
// ended, it requeues members whose candidate nodes are needed.
func (mgr *Manager) updatePause(r *run, now time.Time) bool {
	why := mgr.pause(r, now)
	if why != (reasons.Group{}) {
		r.waitsFor = why
		return true
	}
	if r.waitsFor == reasons.GroupPaused || r.waitsFor == reasons.GroupBehindFailed {
		r.waitsFor = r.awaitsOthers()
		mgr.requeueUnknown(r, now)
	}
	return false
}

// pause returns why the run pauses; none if it doesn't, or if fair sharing has granted it places: they would only be unused for longer.
func (mgr *Manager) pause(r *run, now time.Time) reasons.Group {
	if !mgr.Failures.HasFailuresIn(r.key.Namespace) || r.needed().any(mgr.isGranted) {
		return reasons.Group{}
	}
	switch until, behind := mgr.Failures.PauseUntil(mgr.profile(r), mgr.Ledger.HasAwaited(r.item.ID), now); {
	case !until.After(now):
		return reasons.Group{}
	case behind:
		return reasons.GroupBehindFailed
	}
	return reasons.GroupPaused
}

// tryPlan plans all members that the run still needs, or sets what the run waits for. It has enough members, and doesn't pause.
func (mgr *Manager) tryPlan(r *run, now time.Time) (planned bool) {
	freed := mgr.freed.Load()
	if r.noRoom.appliesTo(r, freed, now) { // Before all that takes longer for more members.
		r.waitsFor = reasons.GroupNoRoom
		return false
	}
	n := r.needed()
	if r.key.Native {
		mgr.offerEligible(r, n, now)
	}
	r.waitsFor = mgr.obstacle(r, n, now)
	if r.waitsFor != (reasons.Group{}) {
		return false
	}
	mgr.build(r, n)
	granted, key := mgr.grantedPlaces(n), roomKey{n.requestsKey, r.item.Priority, r.mayDisplace()}
	// Only r can use these places, or the memory of its awaited reservation.
	exclusive := len(granted) > 0 || mgr.Ledger.HasAwaited(r.item.ID)

	// A run behind one like it can displace fewer runs, so it has no room either.
	if last, found := mgr.noRoomFor[key]; found && !exclusive && last.appliesTo(r, freed, now) {
		r.waitsFor, r.noRoom = reasons.GroupNoRoom, last
		return false
	}
	places := mgr.reserve(r, n, granted, now)
	if places == nil {
		r.waitsFor, r.noRoom = reasons.GroupNoRoom, noRoom{r.item, now, freed}
		if !exclusive {
			mgr.noRoomFor[key] = r.noRoom
		}
		return false
	}
	mgr.beginPlan(r, n, places, now)
	return true
}

// grantedPlaces returns the members whose places fair sharing has granted.
func (mgr *Manager) grantedPlaces(n *needs) (uids []gpu.PodUID) {
	for _, m := range n.requesters {
		if mgr.isGranted(m.Pod) {
			uids = append(uids, m.UID)
		}
	}
	return uids
}

// isGranted reports whether fair sharing has granted the pod a place.
func (mgr *Manager) isGranted(pod gpu.Pod) bool { return mgr.Ledger.HasSource(ledger.Granted, pod.UID) }

// obstacle returns why it can't be tried to place the members; none if it can.
func (mgr *Manager) obstacle(r *run, n *needs, now time.Time) reasons.Group {
	switch {
	case r.key.Native && !n.allOffered(r):
		return reasons.GroupNoRoom
	case !r.membershipClear(now): // Others of its members keep this message until they are tried again, so it must stay true.
		return reasons.GroupUnclear
	case n.any(mgr.AwaitsTurn):
		return reasons.GroupAwaitsTurn
	case !n.allOffered(r):
		return r.awaitsOthers()
	}
	for o := range mgr.planned {
		if n.wholeCards && o.plan.wholeCards && !r.takesFrom(o) {
			return reasons.GroupOlderFirst
		}
	}
	return reasons.Group{}
}

// planWaiting tries to plan the runs that wait, in their order.
func (mgr *Manager) planWaiting(unfinished []*run, now time.Time) {
	freed := mgr.freed.Load()
	maps.DeleteFunc(mgr.noRoomFor, func(_ roomKey, last noRoom) bool { return !last.isValid(freed, now) })
	mgr.work = 0
	first := mgr.resumeAt
	mgr.resumeAt = nil
	for _, r := range unfinished {
		if first != nil && r.item.Before(first) || !r.waits() {
			continue
		}
		if mgr.work >= maxWork {
			next := r.item
			mgr.resumeAt = &next
			return
		}
		if r.needs == nil || r.needs.requests == nil && len(r.offers) > 0 {
			mgr.work += len(r.members)
		}
		if !mgr.updatePause(r, now) && len(r.offers) > 0 && !r.key.Native { // Native groups are tried by filter calls alone.
			mgr.tryPlan(r, now)
		}
	}
}

// noRoom is a result "no room": the run, when it was, and the value of Manager.freed then.
type noRoom struct {
	item  ledger.Item
	at    time.Time
	freed uint64
}

// appliesTo reports whether the run has no room either: it is the run that had none, or one like it that doesn't go before that one.
func (n *noRoom) appliesTo(r *run, freed uint64, now time.Time) bool {
	return n.isValid(freed, now) && !r.item.Before(&n.item)
}

func (n *noRoom) isValid(freed uint64, now time.Time) bool {
	ago := now.Sub(n.at)
	return ago < noRoomMin || n.freed == freed && ago < noRoomMax
}

// roomKey identifies the runs of one requestsKey and priority that may take memory from others (displaces is true), or may not: if one of them has no
// room, those behind it have none.
type roomKey struct {
	requestsKey uint64
	priority    int32
	displaces   bool
}

// Waiting returns the runs that have no plan although only memory or other resources seem to be missing, as items of the queue. Those that
// wait for their turn by fair sharing aren't among them: package dispatch returns these.
func (mgr *Manager) Waiting(now time.Time) (items []queue.Item) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for _, r := range mgr.unfinished() {
		if !r.waits() || r.needed().any(mgr.AwaitsTurn) || !r.onlyLacksResources(now) {
			continue
		}
		key := r.item.ID
		if n := r.needed(); n.requests != nil {
			key = strconv.FormatUint(n.requestsKey, 36) + " " + strconv.Itoa(int(r.item.Priority))
		}
		items = append(items, queue.Item{
			Item: r.item, RoomKey: key, Profile: mgr.profile(r),
			Requests: func() []ledger.Request { return mgr.waitingRequests(r) },
		})
	}
	return items
}

// onlyLacksResources reports whether a lack of memory or other resources is the only known reason why the members are pending.
func (r *run) onlyLacksResources(now time.Time) bool {
	short := map[string]bool{} // By template; members with volumes have one each.
	for _, m := range r.ordered() {
		if m.ShortOfResources && m.counted == pending {
			short[m.Template] = true
		}
	}
	return !slices.ContainsFunc(r.needed().members, func(m *member) bool {
		return !short[m.Template] && (r.waitsFor != reasons.GroupNoRoom || now.Sub(r.offers[m.Template].at) > queue.KubeSchedulerRetries)
	})
}

// waitingRequests returns the requests of the members that the run still needs, with all their eligible nodes.
func (mgr *Manager) waitingRequests(r *run) (requests []ledger.Request) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for _, m := range r.needed().members {
		if m.Request > 0 {
			requests = append(requests, ledger.Request{Pod: m.Pod, Nodes: mgr.EligibleNodes(m.UID)})
		}
	}
	return requests
}

// Status is what a member that isn't bound waits for.
type Status struct {
	Group  Key
	Reason reasons.Group
	// Since is when the last member that the run needs was created, or the oldest one that waits if members are missing; zero if none counts.
	Since time.Time
}

// Status returns what the pod waits for. It returns false for a pod that doesn't wait for its group: one that isn't a
// member, is bound, or is placed like a single pod, unless kube-scheduler doesn't try it; and for all pods while this process doesn't lead.
func (mgr *Manager) Status(uid gpu.PodUID) (Status, bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil || m.run == nil || !m.awaitsBind() {
		return Status{}, false
	}
	status := Status{Group: m.Gang, Reason: mgr.reason(m.run, m), Since: m.run.needed().since}
	return status, status.Reason != reasons.Group{}
}

// reason returns why a member of the run is pending; none if it is placed like a single pod. If m is nil, it is one that has no problem, and a place in
// the plan if there is one.
func (mgr *Manager) reason(r *run, m *member) reasons.Group {
	switch {
	case r.phase == PhaseRunning:
		return mgr.groups[r.key].belowMinCount(r)
	case m != nil && m.problem() != "":
		return reasons.GroupInvalid(m.problem())
	}
	switch r.phase {
	case PhasePending:
		switch {
		case r.waitsFor != (reasons.Group{}):
			return r.waitsFor
		case r.needed().any(mgr.AwaitsTurn): // Filter doesn't ask for the plan before.
			return reasons.GroupAwaitsTurn
		}
		return r.awaitsOthers()
	case PhasePlanned:
		if m != nil && m.place == nil {
			return reasons.GroupSurplus
		}
		return reasons.GroupArriving(r.plan.count[memberArrived], len(r.plan.members))
	case PhaseBinding:
		return reasons.GroupBinding
	case PhaseBroken:
		if r.size() == 0 || m != nil && m.Size != r.size() {
			return r.disagree()
		}
		return reasons.GroupBroken(r.counts[bound]+r.succeededCounted, r.size()).Because(r.waitsFor)
	case PhaseEvicting:
		return reasons.GroupEvicting
	}
	return mgr.incomplete(r)
}

// incomplete returns the reason for members of a run that has too few: how many members exist, and why other pods don't count.
func (mgr *Manager) incomplete(r *run) reasons.Group {
	if r.size() == 0 {
		return r.disagree()
	}
	reason := reasons.GroupIncomplete(r.existing(), r.size())
	if n := r.counts[ineligible]; n > 0 {
		reason = reason.Ineligible(n, r.firstName(func(m *member) bool { return m.counted == ineligible }))
	}
	asking, cardless := r.existing()+r.counts[ineligible], mgr.groups[r.key].cardless
	switch {
	case asking < r.size() && asking+cardless >= r.size():
		reason = reason.Cardless(cardless)
	case r.reported > 0 && r.reportAt.IsZero() && asking == r.existing():
		reason = reason.Stalled(r.workload())
	}
	return reason
}

// awaitsOthers returns the reason that not all members were tried, with their schedulers if they name several.
func (r *run) awaitsOthers() reasons.Group {
	names := map[string]bool{}
	for _, m := range r.members {
		if m.counted == pending || m.counted == bound {
			names[m.Scheduler] = true
		}
	}
	if len(names) < 2 {
		return reasons.GroupAwaitsOthers
	}
	return reasons.GroupAwaitsOthers.OfSchedulers(slices.Sorted(maps.Keys(names)))
}

// workload returns the kind of the workload that all pending members are of; empty if there is none.
func (r *run) workload() string {
	kinds := map[string]bool{}
	for _, m := range r.members {
		if m.counted == pending {
			kinds[m.Kind] = true
		}
	}
	if len(kinds) != 1 {
		return ""
	}
	return slices.Collect(maps.Keys(kinds))[0]
}

// firstName returns the name that sorts first of the members that pass.
func (r *run) firstName(pass func(*member) bool) (first string) {
	for _, m := range r.members {
		if pass(m) && (first == "" || m.Name < first) {
			first = m.Name
		}
	}
	return first
}

// disagree returns the reason of members that say different sizes, with the first pod of each size, for three sizes at most.
func (r *run) disagree() reasons.Group {
	sizes := slices.Sorted(maps.Keys(r.sizes))
	sizes = sizes[:min(len(sizes), 3)]
	var pods []string
	for _, size := range sizes {
		pods = append(pods, r.firstName(func(m *member) bool { return m.counted != other && m.counted != succeeded && m.Size == size }))
	}
	if len(pods) < 2 {
		return reasons.GroupDisagrees
	}
	return reasons.GroupDisagrees.Says(pods, sizes)
}

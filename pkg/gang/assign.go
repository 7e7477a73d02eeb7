package gang

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Which run a pod belongs to. A pod joins a run when the watch reports it (SetMember), or when this process becomes the leader (partition), and moves
// to another one when the home of pods changes (rehome): a run becomes whole, or an earlier one turns out to go on.

// group holds the runs of one key: any number that are running, and at most one that isn't.
type group []*run

// unfinishedRun returns the run that isn't in PhaseRunning, or nil.
func (g group) unfinishedRun() *run {
	for _, r := range g {
		if r.phase != PhaseRunning {
			return r
		}
	}
	return nil
}

// begin adds a run without members.
func (mgr *Manager) begin(key Key, now time.Time) *run {
	r := &run{key: key, members: map[gpu.PodUID]*member{}, tally: newTally(), accepted: map[string]bool{}, since: now, offers: map[string]*offer{}}
	mgr.groups[key] = append(mgr.groups[key], r)
	return r
}

// findOrBegin returns the member's home. If it has none, it begins a run or makes the pod part of one.
//
// A bound pod without a home was bound by another leader: the watch was behind when this process became the leader, and then began again with
// a list. The pods of a list come in any order, so the other members of the pod's run may follow, or be known as unbound. So the pod becomes
// part of the run that isn't running, if mayInclude allows it. giveUp decides later whether this run has lost members; if so, none is
// evicted. As in partition, of several such runs only the one that was bound last can be broken. A pod that can't be part of it counts as a
// member of a whole run.
func (mgr *Manager) findOrBegin(m *member, now time.Time) *run {
	home, unfinished := mgr.home(m), mgr.groups[m.Gang].unfinishedRun()
	switch {
	case home != nil:
		return home
	case m.Node == "":
		return mgr.begin(m.Gang, now)
	case m.Run != "" && unfinished != nil && unfinished.phase == PhaseBroken && unfinished.inherited && unfinished.lastBound().Before(m.BoundAt):
		mgr.nowRuns(unfinished, now)
		unfinished = mgr.groups[m.Gang].unfinishedRun()
	}
	switch {
	case m.Run == "", unfinished == nil && (m.MarkedWhole || m.category() != bound), unfinished != nil && !unfinished.mayInclude(m):
		r := mgr.begin(m.Gang, now)
		r.id = m.Run
		mgr.move(r, PhaseRunning, now)
		return r
	case unfinished == nil:
		unfinished = mgr.begin(m.Gang, now)
	}
	unfinished.id, unfinished.inherited = m.Run, true
	return unfinished
}

// home returns the run that a member belongs to:
//   - a bound pod to the run that its annotation names;
//   - an unbound pod that a running run takes to that run, which it joins alone;
//   - any other unbound pod to the run that isn't running.
//
// It returns nil if there is no such run. All pods of a PodGroup that places them alone belong to one run.
func (mgr *Manager) home(m *member) *run {
	g := mgr.groups[m.Gang]
	for _, r := range g {
		switch {
		case r.phase == PhaseRunning && mgr.placesAlone(m.Gang):
			return r
		case m.Node != "" && m.Run == r.id && (r.id != "" || r.phase == PhaseRunning),
			m.Node == "" && r.phase == PhaseRunning && r.takes(m):
			return r
		}
	}
	if m.Node != "" {
		return nil
	}
	return g.unfinishedRun()
}

// takes reports whether a running run takes the pod: one of a controller that it accepts. While one of its members runs, it takes any pod of a
// native group, since kube-scheduler counts all pods of a PodGroup together, and any pod of a LeaderWorkerSet, whose workers have another
// controller after each restart of their leader.
func (r *run) takes(m *member) bool {
	return r.accepts(m.Controller) || (m.Gang.Native || m.LeaderWorkerSet) && r.counts[bound] > 0
}

// accept makes pods of the controller join the run, also while no member is bound if continues is true.
func (r *run) accept(controller string, continues bool) {
	r.accepted[controller] = r.accepted[controller] || continues
}

// accepts reports whether a pod of the controller joins the run after the run became whole. It does while the run is alive: another member
// runs, or the controller continues it. A pod without a controller joins only while another one runs.
func (r *run) accepts(controller string) bool {
	continues, accepted := r.accepted[controller]
	if controller == "" {
		return accepted && slices.ContainsFunc(r.ordered(), func(m *member) bool { return m.counted == bound && m.Controller == "" })
	}
	return accepted && (continues || r.counts[bound] > 0)
}

// acceptSurplus accepts the controllers of all members once those that the run needs are bound, but no controller that has
// enough members for a run of its own: then a job was restarted while its first pods were pending. If one controller has all bound members,
// the others are of other jobs.
func (r *run) acceptSurplus() {
	existing, ofBound := map[string]int{}, map[string]bool{}
	for _, m := range r.members {
		if m.counted == bound {
			ofBound[m.Controller] = true
		}
		if m.counted != other && m.counted != succeeded {
			existing[m.Controller]++
		}
	}
	for controller, n := range existing {
		if len(ofBound) > 1 && n < r.size() {
			r.accept(controller, false)
		}
	}
}

// mayInclude reports whether the bound pod m may belong to this run, of which no bound pod is known yet. It may if the run has a pod of m's
// controller, or if its oldest pod was created no later than m was bound. Otherwise the run's pods belong to a later run.
func (r *run) mayInclude(m *member) bool {
	same := func(o *member) bool { return o.Controller == m.Controller }
	return r.id == "" && r.counts[bound] == 0 && (!r.created.After(m.BoundAt) || m.Controller != "" && slices.ContainsFunc(r.ordered(), same))
}

// join adds a member to the run.
func (mgr *Manager) join(r *run, m *member) {
	m.run, m.counted = r, m.category()
	r.members[m.UID] = m
	if r.order != nil {
		i, _ := slices.BinarySearchFunc(r.order, m, compareAge)
		r.order = slices.Insert(r.order, i, m)
	}
	r.add(m, 1)
	if !m.Ended && (r.created.IsZero() || m.Created.Before(r.created)) {
		r.created = m.Created
	}
}

// leave removes a member from its run.
func (mgr *Manager) leave(m *member) {
	r := m.run
	r.add(m, -1)
	if (m.Gang.Native || m.LeaderWorkerSet) && r.phase == PhaseRunning { // While it runs, it takes pods of any controller.
		delete(r.accepted, m.Controller)
	}
	delete(r.members, m.UID)
	if i, found := slices.BinarySearchFunc(r.order, m, compareAge); found {
		r.order = slices.Delete(r.order, i, i+1)
	}
	m.run = nil
}

// rehome moves unbound members of the run that belong to another run now. Their new run changes. It may become running and rehome its own
// members. This ends, because a run becomes running only once, and the home of an unbound member depends only on which runs are running
// and which controllers these accept.
func (mgr *Manager) rehome(r *run, now time.Time) {
	if r.unbound() == 0 {
		return
	}
	for _, m := range r.sorted((*member).awaitsBind) {
		if next := mgr.findOrBegin(m, now); next != r {
			mgr.leave(m)
			next.parked = next.parked || r.parked
			mgr.join(next, m)
			mgr.changed(next, m, now)
		}
	}
}

// continues reports whether an earlier run of the group goes on with the members of r, whose controllers create fewer than a run needs. That is so if
// members of the same controller have failed in it: the others of the earlier run have completed, and their pods were removed. It is also so if it
// lacks members, and the controllers are Jobs that their JobSet has created again while others of its Jobs run on.
func (mgr *Manager) continues(r *run) (found bool) {
	for _, o := range mgr.groups[r.key] {
		if o.phase != PhaseRunning {
			continue
		}
		ended, jobSets := map[string]bool{}, map[string]bool{} // The controllers of ended members, and the JobSets of bound ones.
		for _, m := range o.members {
			ended[m.Controller] = ended[m.Controller] || m.Ended
			jobSets[m.JobSet] = jobSets[m.JobSet] || m.counted == bound
		}
		for _, m := range r.members {
			switch {
			case m.counted == pending && m.Controller != "" && ended[m.Controller]:
				o.accept(m.Controller, true)
			case m.JobSet != "" && jobSets[m.JobSet] && o.lacking() > 0:
				o.accept(m.Controller, false)
			default:
				continue
			}
			found = true
		}
	}
	return found
}

// partition divides the members of a group into runs. Bound members belong to the run that their annotation names. At
// most one of these runs can be broken: the one that was bound last. Any earlier run must have ended or been whole before that one began.
func (mgr *Manager) partition(key Key, members []*member, now time.Time) {
	class := func(m *member) int {
		switch {
		case m.category() == bound:
			return 0
		case m.Node != "":
			return 1
		}
		return 2
	}
	slices.SortFunc(members, func(a, b *member) int {
		return cmp.Or(cmp.Compare(class(a), class(b)), b.BoundAt.Compare(a.BoundAt), compareAge(a, b))
	})
	for _, m := range members {
		if unfinished := mgr.groups[key].unfinishedRun(); m.Node == "" && unfinished != nil && unfinished.whole() {
			mgr.move(unfinished, PhaseRunning, now)
		}
		mgr.join(mgr.findOrBegin(m, now), m)
	}
	if unfinished := mgr.groups[key].unfinishedRun(); unfinished != nil && unfinished.inherited && (unfinished.whole() || unfinished.lostMembers()) {
		mgr.nowRuns(unfinished, now)
	}
	for _, r := range slices.Clone(mgr.groups[key]) {
		r.parked = true
		mgr.requeueParked(r)
		mgr.changed(r, nil, now)
	}
}

// lastBound returns when a member was last bound, of the members that are bound now.
func (r *run) lastBound() (last time.Time) {
	for _, m := range r.members {
		if m.counted == bound && m.BoundAt.After(last) {
			last = m.BoundAt
		}
	}
	return last
}

// lostMembers reports whether members must have been deleted after the members of the run were bound. All members exist before the first one
// is bound. So if fewer than the group's size are left of the members that were created before the latest bind, some were deleted after
// it, and the unbound members replace them: the run was whole, even if no member has the mark. The run also counts as whole if a
// controller of one of its bound members created another pod after the latest bind: that pod replaces a lost member. In doubt the run counts
// as whole, because the opposite error would evict a running job. So a run of which no member is known to be missing counts as whole too.
func (r *run) lostMembers() bool {
	if r.counts[pending] == 0 {
		return true
	}
	ofBound := map[string]bool{}
	for _, m := range r.members {
		if m.counted == bound {
			ofBound[m.Controller] = true
			if m.BoundAt.IsZero() {
				return false
			}
		}
	}
	existed, last := r.counts[bound]+r.counts[succeeded], r.lastBound()
	for _, m := range r.members {
		switch {
		case m.counted != pending:
		case !m.Created.After(last):
			existed++
		case ofBound[m.Controller]:
			return true // It replaces a member. Surplus members can't stand for that one.
		}
	}
	return existed < r.size()
}

// removeIfEmpty removes a run without members, unless its binds are in flight.
func (mgr *Manager) removeIfEmpty(r *run) {
	if len(r.members) > 0 || r.plan != nil {
		return
	}
	mgr.groups[r.key] = slices.DeleteFunc(mgr.groups[r.key], func(o *run) bool { return o == r })
	if len(mgr.groups[r.key]) == 0 {
		delete(mgr.groups, r.key)
	}
}

// Membership reports whether the pod is a member of a group, and whether its run is in PhaseRunning. Before this process leads, members have no
// runs, so none counts as whole. A pod that the watch has not reported yet is no member.
func (mgr *Manager) Membership(uid gpu.PodUID) (member, whole bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	return m != nil, m != nil && m.run != nil && m.run.phase == PhaseRunning
}

package gang

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Which run a pod belongs to. A pod joins a run when the watch reports it (SetMember), or when this process becomes the leader (partition), and moves
// to another one when the home of pods changes (rehome): a run becomes whole, or an earlier one turns out to go on.

// group holds the runs of one key: any number that are running, and at most one that isn't.
type group struct {
	key  Key
	runs []*run
	// cardless counts the members that ask for no cards. They belong to no run.
	cardless int
}

// unfinishedRun returns the run that isn't in PhaseRunning, or nil.
func (g *group) unfinishedRun() *run {
	for _, r := range g.runs {
		if r.phase != PhaseRunning {
			return r
		}
	}
	return nil
}

// group returns the group of the key, and adds it if there is none.
func (mgr *Manager) group(key Key) *group {
	g := mgr.groups[key]
	if g == nil {
		g = &group{key: key}
		mgr.groups[key] = g
	}
	return g
}

// begin adds a run without members.
func (mgr *Manager) begin(g *group, now time.Time) *run {
	r := &run{key: g.key, members: map[gpu.PodUID]*member{}, tally: newTally(), since: now, offers: map[string]offer{}}
	g.runs = append(g.runs, r)
	return r
}

// findOrBegin returns the member's home. If it has none, it begins a run or makes the pod part of one.
func (mgr *Manager) findOrBegin(g *group, m *member, now time.Time) *run {
	switch home := mgr.home(g, m); {
	case home != nil:
		return home
	case m.Node == "":
		return mgr.begin(g, now)
	case m.Run != "":
		if r := mgr.inherit(g, m, now); r != nil {
			return r
		}
	}
	r := mgr.begin(g, now)
	r.id = m.Run
	mgr.move(r, PhaseRunning, now)
	return r
}

// inherit makes a bound pod part of the run that isn't running, or begins one. It returns nil if the pod's run was whole.
//
// Another leader has bound the pod: the watch was behind when this process became the leader, and then began again with a list. The pods of a
// list come in any order, so the other members of the pod's run may follow, or be known as unbound. giveUp decides later whether this run has lost
// members; if so, none is evicted. As in partition, of several such runs only the one that was bound last can be broken.
func (mgr *Manager) inherit(g *group, m *member, now time.Time) *run {
	r := g.unfinishedRun()
	if r != nil && r.phase == PhaseBroken && r.inherited && r.lastBound().Before(m.BoundAt) {
		mgr.startRunning(r, now)
		r = g.unfinishedRun()
	}
	switch {
	case r != nil && !r.mayInclude(m), r == nil && (m.marksWhole() || m.category() != bound):
		return nil
	case r == nil:
		r = mgr.begin(g, now)
	}
	r.id, r.inherited = m.Run, true
	return r
}

// home returns the run that a member belongs to:
//   - a bound pod to the run that its annotation names;
//   - an unbound pod of a controller that a running run accepts, or that any live run takes, to that run, which it joins alone;
//   - any other unbound pod to the run that isn't running.
//
// It returns nil if there is no such run. All pods of a PodGroup that places them alone belong to one run.
func (mgr *Manager) home(g *group, m *member) *run {
	for _, r := range g.runs {
		switch {
		case r.phase == PhaseRunning && mgr.placesAlone(g.key):
			return r
		case m.Node != "" && m.Run == r.id && (r.id != "" || r.phase == PhaseRunning),
			m.Node == "" && r.phase == PhaseRunning && (r.accepts(m.Controller) || m.takenByLiveRun() && r.counts[bound] > 0):
			return r
		}
	}
	if m.Node != "" {
		return nil
	}
	return g.unfinishedRun()
}

// mayInclude reports whether the bound pod m may belong to this run, of which no bound pod is known yet. It may if the run has a pod of m's
// controller, or if its oldest pod was created no later than m was bound. Otherwise the run's pods belong to a later run.
func (r *run) mayInclude(m *member) bool {
	return r.id == "" && r.counts[bound] == 0 &&
		(m.Controller != "" && r.controllers[m.Controller] != nil || !r.created.After(m.BoundAt))
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
	if m.takenByLiveRun() && r.phase == PhaseRunning {
		r.forget(m.Controller)
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
	g := mgr.groups[r.key]
	for _, m := range r.sorted((*member).awaitsBind) {
		if next := mgr.findOrBegin(g, m, now); next != r {
			mgr.leave(m)
			next.parked = next.parked || r.parked
			mgr.join(next, m)
			mgr.continueRun(next, m, now)
		}
	}
}

// continues reports whether an earlier run of the group goes on with the members of r, whose controllers create fewer than a run needs. That is so if
// members of the same controller have failed in it: the others of the earlier run have completed, and their pods were removed. It is also so if it
// lacks members, and the controllers are Jobs that their JobSet has created again while others of its Jobs run on.
func (mgr *Manager) continues(r *run) (found bool) {
	for _, o := range mgr.groups[r.key].runs {
		if o.phase != PhaseRunning {
			continue
		}
		jobSets := map[string]bool{} // Those of bound members.
		for _, m := range o.members {
			if c := r.controllers[m.Controller]; m.Ended && m.Controller != "" && c != nil && c.active > 0 {
				o.controllers[m.Controller].continues, found = true, true
			}
			jobSets[m.JobSet] = jobSets[m.JobSet] || m.counted == bound
		}
		for _, m := range r.members {
			if m.JobSet != "" && jobSets[m.JobSet] && o.lacking() > 0 {
				o.controller(m.Controller).accepted, found = true, true
			}
		}
	}
	return found
}

// findWholeRuns sets ofWholeRun of all members.
func (mgr *Manager) findWholeRuns() {
	of := func(m *member) [3]string {
		name, _, _ := strings.Cut(m.Gang.Name, "/")
		return [...]string{m.Namespace, name, m.Run}
	}
	whole := map[[3]string]bool{}
	for _, m := range mgr.members {
		if m.MarkedWhole && m.Run != "" {
			whole[of(m)] = true
		}
	}
	for _, m := range mgr.members {
		m.ofWholeRun = m.Node != "" && whole[of(m)]
	}
}

// partition divides the members of a group into runs. Bound members belong to the run that their annotation names. At
// most one of these runs can be broken: the one that was bound last. Any earlier run must have ended or been whole before that one began.
func (mgr *Manager) partition(g *group, members []*member, now time.Time) {
	slices.SortFunc(members, func(a, b *member) int {
		return cmp.Or(gpu.TrueFirst(a.category() == bound, b.category() == bound), gpu.TrueFirst(a.Node != "", b.Node != ""),
			b.BoundAt.Compare(a.BoundAt), compareAge(a, b))
	})
	for _, m := range members {
		mgr.join(mgr.findOrBegin(g, m, now), m)
	}
	if unfinished := g.unfinishedRun(); unfinished != nil && unfinished.inherited && (unfinished.whole() || unfinished.lostMembers()) {
		mgr.startRunning(unfinished, now)
	}
	for _, r := range slices.Clone(g.runs) {
		r.parked = true
		mgr.requeueParked(r)
		mgr.continueRun(r, nil, now)
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
	unknown, completes := false, false
	for _, m := range r.members {
		unknown = unknown || m.counted == bound && m.BoundAt.IsZero()
		completes = completes || m.counted == pending && (r.size() == 0 || r.mayComplete(m))
	}
	if !completes || unknown {
		return !completes
	}
	existed, last := r.counts[bound]+r.succeededCounted, r.lastBound()
	for _, m := range r.members {
		switch c := r.controllers[m.Controller]; {
		case m.counted != pending:
		case m.Created.After(last):
			if c.bound > 0 {
				return true // It replaces a member, whatever number it names. Surplus members can't stand for that one.
			}
		case r.mayComplete(m):
			existed++
		}
	}
	return existed < r.size()
}

// removeIfEmpty removes a run without members, unless its binds are in flight.
func (mgr *Manager) removeIfEmpty(r *run) {
	g := mgr.groups[r.key]
	if len(r.members) > 0 || r.plan != nil || g == nil {
		return
	}
	g.runs = slices.DeleteFunc(g.runs, func(o *run) bool { return o == r })
	mgr.removeIfUnused(g)
}

// removeIfUnused removes a group without pods.
func (mgr *Manager) removeIfUnused(g *group) {
	if len(g.runs) == 0 && g.cardless == 0 {
		delete(mgr.groups, g.key)
	}
}

// Membership reports whether the pod is a member of a group, and whether the group doesn't need it any more: its run is in PhaseRunning, or it asks
// for no cards. Before this process leads, members have no runs, so none counts as whole. A pod that the watch has not reported yet is no member.
func (mgr *Manager) Membership(uid gpu.PodUID) (member, whole bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	return m != nil, m != nil && (m.Cardless || m.run != nil && m.run.phase == PhaseRunning)
}

package gang

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// StartLeading is called when this process becomes the leader. It divides the members into runs, from what the API
// server knows of them alone. It is unknown which pods another replica rejected, so all of them count as rejected.
func (mgr *Manager) StartLeading(now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	if mgr.leading {
		return
	}
	mgr.leading = true
	members := map[*group][]*member{}
	for _, m := range mgr.members {
		g := mgr.group(m.Gang)
		if m.Cardless {
			g.cardless++
		} else {
			members[g] = append(members[g], m)
		}
	}
	byKey := func(a, b *group) int { return a.key.Compare(b.key) }
	for _, g := range slices.SortedFunc(maps.Keys(members), byKey) {
		mgr.partition(g, members[g], now)
	}
}

// partition divides the members of a group into runs. Bound members belong to the run that their annotation names. At
// most one of these runs can be broken: the one that was bound last, since an earlier one must have ended or been whole
// before.
func (mgr *Manager) partition(g *group, members []*member, now time.Time) {
	var unbound []*member
	for _, m := range members {
		if m.Node == "" {
			unbound = append(unbound, m)
			continue
		}
		i := slices.IndexFunc(g.runs, func(r *run) bool { return r.id == m.Run })
		if i < 0 {
			mgr.begin(g, m.Run, now)
			i = len(g.runs) - 1
		}
		mgr.join(g.runs[i], m)
	}
	slices.SortFunc(g.runs, func(a, b *run) int {
		return cmp.Or(lastBound(b).Compare(lastBound(a)), strings.Compare(a.id, b.id))
	})
	var open *run
	for _, r := range g.runs {
		if open == nil && r.counts[running] > 0 && !r.whole() {
			open, r.inherited = r, true
		} else {
			mgr.move(r, ranBefore, PhaseRunning, now)
		}
	}
	next := mgr.joinRunning(g, unbound)
	if open != nil && open.lostMembers(next, mgr) {
		mgr.move(open, ranBefore, PhaseRunning, now)
		open, next = nil, mgr.joinRunning(g, next)
	}
	if open == nil && len(next) > 0 {
		open = mgr.begin(g, "", now)
	}
	for _, m := range next {
		mgr.join(open, m)
	}
	for _, r := range slices.Clone(g.runs) {
		r.parked = true
		mgr.requeueParked(r)
		mgr.changed(r, nil, now)
	}
}

// joinRunning adds the unbound members to the running runs that accept them, and returns the others.
func (mgr *Manager) joinRunning(g *group, unbound []*member) (rest []*member) {
	for _, m := range unbound {
		i := slices.IndexFunc(g.runs, func(r *run) bool { return r.phase == PhaseRunning && r.accepts(m.Controller) })
		if i < 0 {
			rest = append(rest, m)
		} else {
			mgr.join(g.runs[i], m)
		}
	}
	return rest
}

func lastBound(r *run) (last time.Time) {
	for _, m := range r.members {
		if m.counted == running && m.BoundAt.After(last) {
			last = m.BoundAt
		}
	}
	return last
}

// lostMembers reports whether members must have been deleted since those of the run were bound; unbound are the members
// that would join it. A run's first bind isn't made before all its members exist. If too few of those that existed at the
// latest bind are left, the unbound members replace others, and the run counts as whole although no member marks it. So it
// does if a controller of a bound member has created another pod since: that replaces one that was lost. The opposite
// error would evict a running job. Therefore a run that nothing is known to be missing from counts as whole too.
func (r *run) lostMembers(unbound []*member, mgr *Manager) bool {
	unbound = slices.DeleteFunc(slices.Clone(unbound), func(m *member) bool { return mgr.countAs(m) != pending })
	if len(unbound) == 0 {
		return true
	}
	for _, m := range r.members {
		if m.counted == running && m.BoundAt.IsZero() {
			return false
		}
	}
	existed := r.counts[running] + r.finished
	for _, m := range unbound {
		switch c := r.controllers[m.Controller]; {
		case !m.Created.After(lastBound(r)):
			existed++
		case c != nil && c.running > 0:
			return true // It replaces a member. Surplus members can't stand for that one.
		}
	}
	return existed < r.size()
}

// StopLeading is called while this process isn't the leader, and when it stops. It rejects the held binds, releases what
// is reserved for binds that were not granted, and forgets all runs.
func (mgr *Manager) StopLeading(now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	if !mgr.leading {
		return
	}
	mgr.leading = false
	for _, key := range slices.SortedFunc(maps.Keys(mgr.groups), Key.Compare) {
		for _, r := range mgr.groups[key].runs {
			if r.plan != nil {
				mgr.dropPlan(r, Stopping)
			}
		}
	}
	for _, m := range mgr.members {
		m.run, m.gone = nil, false
	}
	mgr.endStarvation(now)
	mgr.groups, mgr.waiting, mgr.placed, mgr.alarms = map[Key]*group{}, nil, nil, nil
	mgr.places, mgr.effects = map[string]map[gpu.PodUID]struct{}{}, Effects{} // The next leader has effects of its own.
}

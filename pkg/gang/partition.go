package gang

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/reasons"
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
	mgr.findWholeRuns()
	members := map[*group][]*member{}
	for _, m := range mgr.members {
		m.groupProblem = mgr.resolve(&m.Member)
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

// findWholeRuns sets ofWholeRun of all members.
func (mgr *Manager) findWholeRuns() {
	type run struct{ namespace, name, id string }
	of := func(m *member) run {
		name, _, _ := strings.Cut(m.Gang.Name, "/")
		return run{m.Namespace, name, m.Run}
	}
	whole := map[run]bool{}
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
	class := func(m *member) int {
		switch {
		case mgr.countAs(m) == bound:
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
		if starting := g.starting(); m.Node == "" && starting != nil && starting.whole() {
			mgr.move(starting, ranBefore, PhaseRunning, now)
		}
		mgr.join(mgr.findOrBegin(g, m, now), m)
	}
	if starting := g.starting(); starting != nil && starting.inherited && (starting.whole() || starting.lostMembers()) {
		mgr.move(starting, ranBefore, PhaseRunning, now)
	}
	for _, r := range slices.Clone(g.runs) {
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
	for _, m := range r.members {
		if m.counted == bound && m.BoundAt.IsZero() {
			return false
		}
	}
	existed, last := r.counts[bound]+r.finished, r.lastBound()
	for _, m := range r.members {
		switch c := r.controllers[m.Controller]; {
		case m.counted != pending:
		case !m.Created.After(last):
			existed++
		case c.bound > 0:
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
				mgr.Failures.Ended(r.plan.attempt)
				mgr.dropPlan(r, reasons.GroupStopping)
			}
		}
	}
	for _, m := range mgr.members {
		m.run, m.gone = nil, false
	}
	mgr.groups, mgr.waiting, mgr.placed, mgr.alarms = map[Key]*group{}, nil, nil, nil
	mgr.noRoomFor, mgr.resumeAt = map[likeRuns]noRoom{}, nil
	mgr.effects = Effects{} // The next leader has effects of its own.
}

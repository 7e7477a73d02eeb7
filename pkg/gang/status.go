package gang

import (
	"cmp"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Status is what a member that isn't bound waits for.
type Status struct {
	Group  Key
	Reason reasons.Group
	// Since is when the last member that the run needs was created, or the oldest one that waits if members are missing; zero if none counts.
	Since time.Time
}

// Waits returns what the pod waits for. It returns false for a pod that doesn't wait for its group: one that isn't a
// member, is bound, or is placed like a single pod; and for all pods while this process doesn't lead.
func (mgr *Manager) Waits(uid gpu.PodUID) (Status, bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil || m.run == nil || !m.awaitsBind() || m.run.phase == PhaseRunning {
		return Status{}, false
	}
	return Status{Group: m.Gang, Reason: m.run.reason(m), Since: m.run.needed().since}, true
}

// reason returns why a member of a run that isn't running is pending. If m is nil, it is one that has no problem, and a place in the plan if there
// is one.
func (r *run) reason(m *member) reasons.Group {
	if m != nil && m.problem() != "" {
		return reasons.GroupInvalid(m.problem())
	}
	switch r.phase {
	case PhasePending:
		return cmp.Or(r.wait, reasons.GroupAwaitsOthers)
	case PhasePlanned, PhasePermitting:
		if m != nil && r.plan.members[m.UID] == nil {
			return reasons.GroupSurplus
		}
		return r.arriving()
	case PhaseBinding:
		return reasons.GroupBinding
	case PhaseBroken:
		return r.broken(r.wait)
	case PhaseEvicting:
		return reasons.GroupEvicting
	}
	return r.incomplete()
}

// InPendingGang reports whether the pod, which names a group, asks for cards and is a member of a run that isn't known to be running. A pod
// that the watch has not reported yet counts as such a member; it is requeued when the watch reports it.
func (mgr *Manager) InPendingGang(uid gpu.PodUID) bool {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil {
		mgr.rememberUnknown(uid)
		return true
	}
	return !m.Cardless && (m.run == nil || m.run.phase != PhaseRunning)
}

// Membership reports whether the pod is a member of a group, and whether its run is whole: all members that it needs are bound. Before this process
// leads, members have no runs, so none counts as whole.
func (mgr *Manager) Membership(uid gpu.PodUID) (member, whole bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	return m != nil, m != nil && m.run != nil && m.run.phase == PhaseRunning
}

// HeldBinds counts the held binds.
func (mgr *Manager) HeldBinds() (n int) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for _, g := range mgr.groups {
		for _, r := range g.runs {
			if r.plan != nil {
				n += r.plan.held
			}
		}
	}
	return n
}

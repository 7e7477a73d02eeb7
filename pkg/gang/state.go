package gang

import (
	"fmt"
	"slices"
	"time"
)

// Phase is the phase of a run.
type Phase uint8

// The phases.
const (
	// PhaseIncomplete: too few members exist.
	PhaseIncomplete Phase = iota
	// PhasePending: enough members exist, and no memory is reserved for them.
	PhasePending
	// PhasePlanned: memory is reserved for all members.
	PhasePlanned
	// PhasePermitting is what users see of PhasePlanned once members have arrived.
	PhasePermitting
	// PhaseBinding: the barrier is open, and binds are in flight or unconfirmed.
	PhaseBinding
	// PhaseRunning: nothing more is decided for all members together, mostly because all have been bound. Members that come, or come back, are placed
	// like pods without a group.
	PhaseRunning
	// PhaseBroken: some members are bound, and others could not be.
	PhaseBroken
	// PhaseEvicting: the bound members are being evicted.
	PhaseEvicting

	phases
)

var phaseNames = [phases]string{"incomplete", "pending", "planned", "permitting", "binding", "running", "broken", "evicting"}

// String returns the phase as metrics and docs name it.
func (p Phase) String() string { return phaseNames[p] }

// transitions are the phases that may follow each phase; docs/design.md draws them, with what causes each change. A run begins as incomplete.
var transitions = [phases][]Phase{
	PhaseIncomplete: {PhasePending, PhaseRunning, PhaseBroken},
	PhasePending:    {PhaseIncomplete, PhasePlanned, PhaseRunning, PhaseBroken},
	PhasePlanned:    {PhaseIncomplete, PhasePending, PhaseBinding, PhaseRunning, PhaseBroken},
	PhaseBinding:    {PhaseIncomplete, PhasePending, PhaseRunning, PhaseBroken},
	PhaseBroken:     {PhaseIncomplete, PhasePending, PhasePlanned, PhaseRunning, PhaseEvicting},
	PhaseEvicting:   {PhaseIncomplete, PhasePending, PhaseRunning},
}

// move changes the phase of a run. It is the only function that does. A transition that the table doesn't contain is a
// defect of the caller, which tests detect.
func (mgr *Manager) move(r *run, to Phase, now time.Time) {
	if mgr.IllegalMove != nil && !slices.Contains(transitions[r.phase], to) {
		mgr.IllegalMove(fmt.Sprintf("a run that is %v becomes %v", r.phase, to))
	}
	if r.phase.isStarting() != to.isStarting() || to == PhaseIncomplete {
		r.since = now
	}
	if to == PhaseBroken && r.phase != PhasePlanned {
		r.brokeAt = now
	}
	r.phase = to
	delete(mgr.planned, r)
	if to == PhasePlanned {
		mgr.planned[r] = true
	}
	mgr.rank(r)
}

// isStarting reports whether enough members exist in this phase and are not all bound.
func (p Phase) isStarting() bool {
	return p != PhaseIncomplete && p != PhaseRunning && p != PhaseEvicting
}

// shownPhase returns the phase as users see it.
func (r *run) shownPhase() Phase {
	if r.phase == PhasePlanned && r.plan.count[memberArrived] > 0 {
		return PhasePermitting
	}
	return r.phase
}

// Phases counts the runs by phase, except for those whose members have all ended.
func (mgr *Manager) Phases() map[Phase]int {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	out := map[Phase]int{}
	for phase := range phases {
		out[phase] = 0
	}
	for _, g := range mgr.groups {
		for _, r := range g.runs {
			if r.counts[other]+r.counts[succeeded] < len(r.members) || r.phase == PhaseBinding {
				out[r.shownPhase()]++
			}
		}
	}
	return out
}

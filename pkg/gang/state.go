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
	// PhasePermitting is what users see of PhasePlanned while bind calls are held, until all members have arrived.
	PhasePermitting
	// PhaseBinding: the barrier is open, and binds are in flight or unconfirmed.
	PhaseBinding
	// PhaseRunning: all members have been bound. Further members are placed like pods without a group.
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

// trigger is what makes a run leave a phase, in the words of the diagram in docs/design.md.
type trigger string

const (
	enoughMembers  trigger = "enough members exist"
	memberWent     trigger = "a member went"
	placesReserved trigger = "memory for all is reserved"
	planDropped    trigger = "the plan is dropped"
	allArrived     trigger = "all have arrived"
	bindsEnded     trigger = "not all could be bound"
	foundBound     trigger = "a member is found bound"
	noneBound      trigger = "no bound member is left"
	allBound       trigger = "all are bound"
	ranBefore      trigger = "it ran before"
	placedAlone    trigger = "its policy is basic"
	policyKeep     trigger = "still not bound, policy keep"
	policyEvict    trigger = "still not bound, policy evict"
)

// transition is one permitted change of a run's phase.
type transition struct {
	From    Phase
	Trigger trigger
	To      Phase
}

// transitions are all permitted changes. A run begins as incomplete.
var transitions = []transition{
	{PhaseIncomplete, enoughMembers, PhasePending},
	{PhaseIncomplete, foundBound, PhaseBroken},
	{PhaseIncomplete, allBound, PhaseRunning},
	{PhaseIncomplete, ranBefore, PhaseRunning},
	{PhaseIncomplete, placedAlone, PhaseRunning},
	{PhasePending, memberWent, PhaseIncomplete},
	{PhasePending, placesReserved, PhasePlanned},
	{PhasePending, foundBound, PhaseBroken},
	{PhasePending, allBound, PhaseRunning},
	{PhasePlanned, allArrived, PhaseBinding},
	{PhasePlanned, planDropped, PhasePending},
	{PhasePlanned, planDropped, PhaseIncomplete},
	{PhasePlanned, planDropped, PhaseBroken},
	{PhasePlanned, allBound, PhaseRunning},
	{PhaseBinding, allBound, PhaseRunning},
	{PhaseBinding, bindsEnded, PhaseBroken},
	{PhaseBinding, bindsEnded, PhasePending},
	{PhaseBinding, bindsEnded, PhaseIncomplete},
	{PhaseBroken, placesReserved, PhasePlanned},
	{PhaseBroken, allBound, PhaseRunning},
	{PhaseBroken, noneBound, PhasePending},
	{PhaseBroken, noneBound, PhaseIncomplete},
	{PhaseBroken, ranBefore, PhaseRunning},
	{PhaseBroken, placedAlone, PhaseRunning},
	{PhaseBroken, policyKeep, PhaseRunning},
	{PhaseBroken, policyEvict, PhaseEvicting},
	{PhaseEvicting, allBound, PhaseRunning},
	{PhaseEvicting, noneBound, PhasePending},
	{PhaseEvicting, noneBound, PhaseIncomplete},
}

// move changes the phase of a run. It is the only function that does. A transition that the table doesn't contain is a
// defect of the caller, which tests detect.
func (mgr *Manager) move(r *run, why trigger, to Phase, now time.Time) {
	if mgr.IllegalMove != nil && !slices.Contains(transitions, transition{r.phase, why, to}) {
		mgr.IllegalMove(fmt.Sprintf("a run that is %v becomes %v: %s", r.phase, to, why))
	}
	if r.waits() != to.waits() || to == PhaseIncomplete {
		r.since = now
	}
	if to == PhaseBroken && why != planDropped {
		r.brokeAt = now
	}
	r.phase = to
	mgr.reorder(r)
}

// waits reports whether enough members exist in this phase and are not all bound.
func (p Phase) waits() bool { return p != PhaseIncomplete && p != PhaseRunning && p != PhaseEvicting }

func (r *run) waits() bool { return r.phase.waits() }

// shownPhase returns the phase as users see it.
func (r *run) shownPhase() Phase {
	if r.phase == PhasePlanned && r.plan.count[memberHeld] > 0 {
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

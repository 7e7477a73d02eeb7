package gang

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// The reasons of Events.
const (
	EventInvalid    = "GangInvalid"
	EventIncomplete = "GangIncomplete"
	EventBound      = "GangBound"
	EventNotBound   = "GangNotBound"
	EventEvicted    = "GangEvicted"
	EventPartial    = "GangPartial"
)

// FailurePolicy is what happens to the bound members of a partial gang that doesn't become whole in time.
type FailurePolicy string

// The failure policies.
const (
	Evict FailurePolicy = "evict"
	Keep  FailurePolicy = "keep"
)

// Options configure a Manager.
type Options struct {
	// Ledger reserves memory for plans.
	Ledger Ledger
	// Release releases a pod's reservation, unless an earlier bind of the pod is in flight or unconfirmed.
	Release func(gpu.PodUID)
	View    ledger.View
	// EligibleNodes returns the nodes that the pod can run on regardless of free resources. It is called rarely, with
	// the Manager's lock held.
	EligibleNodes func(gpu.PodUID) []string
	// Capacity returns a new count of what nodes have free besides GPU memory. planned returns the members that are planned
	// to a node and not bound yet; nil means none. If empty is true, the nodes count without their pods, except those that
	// stay. If Capacity is nil, only GPU memory counts.
	Capacity func(planned func(node string) []gpu.PodUID, empty bool) ledger.Capacity
	// Memory returns the cluster's shared GPU memory.
	Memory func() gpu.Memory
	// StarvationAfter is how long a gang waits before freed memory is reserved for it; 0 disables starvation
	// reservations.
	StarvationAfter time.Duration
	// Hold is how long a bind is held at most.
	Hold time.Duration
	// Patience is how long a plan's reservations last while members are missing, and how long a gang may stay partial.
	Patience  time.Duration
	OnFailure FailurePolicy
	// Observer receives what metrics count. It is called with the Manager's lock held and must not block.
	Observer Observer
}

// Ledger is the part of package ledger that a Manager uses.
type Ledger interface {
	ReserveAll(requests []ledger.Request, yielding [][]gpu.PodUID, view ledger.View, capacity ledger.Capacity, at time.Time) ([]ledger.Reservation, int)
	Move(request ledger.Request, view ledger.View, capacity ledger.Capacity, at time.Time) (string, bool)
	StillUsable(uid gpu.PodUID) bool
	ReserveForStarving(requests []ledger.Request, priority int32, label string, capacity ledger.Capacity) bool
	EndStarvationReservation()
}

// Observer receives what metrics count.
type Observer interface {
	// GangHeld is called when a barrier opens, with the time for which the first member was held.
	GangHeld(wait time.Duration)
	// GangBound counts gangs of which all members were bound.
	GangBound()
	// GangFailed counts failed rounds, by the label of the reason.
	GangFailed(reason string)
	// GangStarving counts starvation reservations.
	GangStarving()
	// GangEvicted counts evicted members of partial gangs.
	GangEvicted()
}

// Effects are the actions that the caller of a Manager must perform.
type Effects struct {
	// Requeue is true if kube-scheduler must retry rejected pods, by a change of RequeueNode, or of any node if that is
	// empty.
	RequeueNode string
	Requeue     bool
	// WholePriorities are the priorities of gangs that became whole. From now on pods of higher priority can preempt
	// their members.
	WholePriorities []int32
	// Events are the Events to record.
	Events []Event
	// Evict are the pods to evict.
	Evict []gpu.Pod
	// Verify are the pods to read from the API server. The results are passed to Confirmed or ConfirmedGone.
	Verify []gpu.Pod
}

// Event is an Event to record on a pod.
type Event struct {
	Pod          gpu.Pod
	Warning      bool
	Reason, Text string
}

// Manager holds all gangs. mu guards the fields below it and is held for in-memory work only.
type Manager struct {
	Options
	// freed counts how often memory was freed.
	freed atomic.Uint64

	mu      sync.Mutex
	gangs   map[Key]*gang
	members map[gpu.PodUID]*member
	// unknownPods are the pods of filter calls that the watch has not reported yet, with the time of the latest call.
	unknownPods map[gpu.PodUID]time.Time
	// lastCandidates is the latest list of candidate nodes. Equal lists are stored once, and most are equal.
	lastCandidates []string
	// queue holds the gangs without a plan that were ready at the latest Tick, in the order in which they go.
	queue      []*gang
	burst      freeBurst
	starvation starvationState
	effects    Effects
}

// New returns a Manager without gangs.
func New(o Options) *Manager {
	return &Manager{
		Options: o, gangs: map[Key]*gang{}, members: map[gpu.PodUID]*member{}, unknownPods: map[gpu.PodUID]time.Time{},
	}
}

// MemoryFreed records that memory was freed on some node. It takes no lock.
func (mgr *Manager) MemoryFreed() { mgr.freed.Add(1) }

// TakeEffects returns the effects since the last call.
func (mgr *Manager) TakeEffects() Effects {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	out := mgr.effects
	mgr.effects = Effects{}
	return out
}

// SetMember adds or updates a member.
func (mgr *Manager) SetMember(m Member, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	known := mgr.members[m.UID]
	if known != nil && known.Gang != m.Gang {
		mgr.removeMember(known, now)
		known = nil
	}
	g := mgr.gangs[m.Gang]
	if g == nil {
		g = &gang{key: m.Gang, members: map[gpu.PodUID]*member{}}
		mgr.gangs[m.Gang] = g
	}
	wasPending := known != nil && known.pending()
	if known == nil {
		known = &member{}
		mgr.members[m.UID], g.members[m.UID] = known, known
		if _, filtered := mgr.unknownPods[m.UID]; filtered {
			delete(mgr.unknownPods, m.UID)
			known.rejected = true
			mgr.requeue("")
		}
	}
	if known.bound && m.Node == "" {
		m.Node, m.MarkedWhole = known.Node, known.MarkedWhole // The watch has not reported our bind yet.
	}
	known.Member = m
	size := g.size
	g.membersChanged()
	if g.size != size {
		mgr.dropPlan(g, Changed, now, false)                  // The plan was made for the old size.
		g.needsRequeue = g.needsRequeue || len(g.members) > 1 // The others may be enough now.
	}
	if wasPending && !known.pending() {
		mgr.memberLost(g, m.UID, now)
	}
	if !wasPending && known.pending() && !g.whole {
		mgr.requeueIfComplete(g)
	}
}

// requeueIfComplete requeues the members that were rejected before the last one was created.
func (mgr *Manager) requeueIfComplete(g *gang) {
	if counts := g.count(); g.size > 0 && counts.existing() == g.size {
		mgr.requeueRejected(g)
	}
}

// RemoveMember removes a pod that was deleted or isn't a member any more. It does nothing for other pods.
func (mgr *Manager) RemoveMember(uid gpu.PodUID, now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	delete(mgr.unknownPods, uid)
	if m := mgr.members[uid]; m != nil {
		mgr.removeMember(m, now)
	}
}

func (mgr *Manager) removeMember(m *member, now time.Time) {
	g := mgr.gangs[m.Gang]
	delete(g.members, m.UID)
	delete(mgr.members, m.UID)
	if mgr.starvation.gang == g {
		mgr.endStarvation(now) // The removed member was part of it.
	}
	size := g.size
	g.membersChanged()
	g.needsRequeue = g.needsRequeue || g.size != size // The remaining members may agree on the size now, and be enough.
	mgr.memberLost(g, m.UID, now)
	mgr.removeIfEmpty(g)
}

// removeIfEmpty removes a gang without members, unless its binds are in flight.
func (mgr *Manager) removeIfEmpty(g *gang) {
	if len(g.members) == 0 && !g.binding() {
		mgr.dropPlan(g, Deleted, time.Time{}, false)
		delete(mgr.gangs, g.key)
	}
}

// memberLost drops the plan if it contains this member, which isn't pending any more.
func (mgr *Manager) memberLost(g *gang, uid gpu.PodUID, now time.Time) {
	if g.plan != nil && g.plan.members[uid] != nil {
		mgr.dropPlan(g, Deleted, now, true)
	}
}

// GangOf returns the gang of the pod.
func (mgr *Manager) GangOf(uid gpu.PodUID) (Key, bool) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil {
		return Key{}, false
	}
	return m.Gang, true
}

// InPendingGang reports whether the pod asks for cards and is a member of a gang that isn't whole.
func (mgr *Manager) InPendingGang(uid gpu.PodUID) bool {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	return m != nil && !m.Cardless && !mgr.gangs[m.Gang].whole
}

// Tick ends what has lasted too long and plans the gangs that are ready. Only the leader may call it, several times a
// second, once the cache is synced.
func (mgr *Manager) Tick(now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for uid, at := range mgr.unknownPods {
		if now.Sub(at) > unknownLifetime {
			delete(mgr.unknownPods, uid)
		}
	}
	var ready []*gang
	for _, g := range mgr.gangs {
		g.updateState(now)
		mgr.expirePlan(g, now)
		mgr.endPartial(g, now)
		mgr.reportIncomplete(g, now)
		switch {
		case g.whole && g.needsRequeue:
			mgr.requeueRejected(g) // Surplus members, or members whose first bind failed.
			g.needsRequeue = false
		case g.plan == nil && !g.evicting && !g.readySince.IsZero() && !now.Before(g.notBefore):
			ready = append(ready, g)
		}
	}
	slices.SortFunc(ready, compareGangs)
	mgr.queue = ready
	mgr.burst.observe(mgr.freed.Load(), now) // On each Tick, even if no gang is ready.
	for _, g := range ready {
		counts := g.count()
		if g.needsRequeue {
			if _, known := g.selectMembers(counts, g.hasCandidates); !known {
				mgr.requeueRejected(g) // Their candidate nodes must be known again, even if another gang goes first.
			}
			g.needsRequeue = false
		}
		if len(g.candidates) > 0 { // Otherwise kube-scheduler itself finds no node for any member.
			_, _ = mgr.makePlan(g, counts, now) // If this fails, the next Tick tries again.
		}
	}
	mgr.updateStarvation(ready, now)
}

// unknownLifetime is how long a pod is remembered that the watch doesn't report, and maxUnknown is how many of them
// are, so that requests for pods that don't exist can't exhaust the memory.
const (
	unknownLifetime = 10 * time.Minute
	maxUnknown      = 20_000
)

// expirePlan ends plans that have expired, and rejects binds that were held for too long.
func (mgr *Manager) expirePlan(g *gang, now time.Time) {
	p := g.plan
	if p == nil || p.isOpen() {
		return
	}
	if !now.Before(p.expires) {
		mgr.recordEvent(g, true, EventNotBound, Expired.Text)
		mgr.dropPlan(g, Expired, now, true)
		return
	}
	for uid, pm := range p.members {
		if pm.node != "" && !mgr.Ledger.StillUsable(uid) {
			mgr.dropPlan(g, PlaceLost, now, true)
			return
		}
		if pm.permit != nil && !now.Before(pm.permit.deadline) {
			mgr.timeOut(p, now)
			return
		}
	}
}

// evictRetry is the time after which evictions are requested again.
const evictRetry = 5 * time.Second

// endPartial ends a partial gang that didn't become whole within Patience: its bound members are evicted, or stay if
// the policy is Keep.
func (mgr *Manager) endPartial(g *gang, now time.Time) {
	if g.partialSince.IsZero() || now.Sub(g.partialSince) < mgr.Patience {
		return
	}
	if mgr.OnFailure == Keep {
		mgr.recordEvent(g, true, EventPartial, "The group stays partially bound: its other members could not be bound in time")
		mgr.dropPlan(g, Expired, now, false)
		g.whole, g.needsRequeue = true, true
		return
	}
	if !g.evicting {
		mgr.dropPlan(g, Expired, now, true)
	}
	if g.evicting && now.Sub(g.evictedAt) < evictRetry {
		return
	}
	g.evicting, g.evictedAt = true, now
	for _, m := range g.sorted(func(m *member) bool { return m.running() }) {
		mgr.effects.Evict = append(mgr.effects.Evict, m.Pod)
	}
}

// reportIncomplete records an Event on a gang that gets no more members. Often they will never be created: a
// StatefulSet by default creates its next pod when the previous one is ready, and a Job has no more pods at once than
// its parallelism.
func (mgr *Manager) reportIncomplete(g *gang, now time.Time) {
	if g.incompleteSince.IsZero() || now.Sub(g.incompleteSince) < mgr.Patience {
		return
	}
	counts := g.count()
	if counts.tooFewAskForCards(g.size) {
		return // Filter records this Event.
	}
	if counts.ineligible > 0 {
		mgr.recordEvent(g, true, EventIncomplete, fmt.Sprintf("The group needs %d members and only %d can be placed: they wait for the others. "+
			"Some of those exist, but have scheduling gates or can't be counted as members", g.size, g.incomplete))
		return
	}
	mgr.recordEvent(g, true, EventIncomplete, fmt.Sprintf("The group needs %d members and only %d exist: they wait for the others. "+
		"All must be created at once: by a StatefulSet with podManagementPolicy Parallel, or by a Job whose parallelism is not smaller",
		g.size, g.incomplete))
}

// StartLeading is called when this process becomes the leader. It is unknown which pods another replica rejected, so
// all pending members count as rejected.
func (mgr *Manager) StartLeading(time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for _, g := range mgr.gangs {
		g.needsRequeue = true
		for _, m := range g.members {
			m.rejected = m.pending()
		}
	}
}

// StopLeading is called while this process isn't the leader, and when it stops. It drops all plans whose barrier hasn't
// opened.
func (mgr *Manager) StopLeading(now time.Time) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for _, g := range mgr.gangs {
		mgr.dropPlan(g, Stopping, now, false)
		g.partialSince, g.evicting, g.candidates = time.Time{}, false, nil
	}
	mgr.queue = nil
	mgr.endStarvation(now)
}

// requeue makes kube-scheduler retry rejected pods, by a change of this node, or of any node if it is empty.
func (mgr *Manager) requeue(node string) {
	mgr.effects.Requeue = true
	if node != "" {
		mgr.effects.RequeueNode = node
	}
}

// requeueRejected requeues the gang's pending members if any of them was rejected.
func (mgr *Manager) requeueRejected(g *gang) {
	for _, m := range g.members {
		if m.rejected && m.pending() {
			mgr.requeue(anyOf(g.candidates[m.Template]))
			return
		}
	}
}

// recordEvent records an Event on the gang's oldest member, unless it repeats the gang's latest Event.
func (mgr *Manager) recordEvent(g *gang, warning bool, reason, text string) {
	if g.lastEvent == reason+text {
		return
	}
	pod, ok := g.eventPod()
	if !ok {
		return
	}
	g.lastEvent = reason + text
	mgr.effects.Events = append(mgr.effects.Events, Event{pod, warning, reason, text})
}

// Phases counts the runs by phase.
func (mgr *Manager) Phases() map[Phase]int {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	out := map[Phase]int{}
	for p := range phases {
		out[p] = 0
	}
	for _, g := range mgr.gangs {
		out[g.phase()]++
	}
	return out
}

func (g *gang) phase() Phase {
	counts := g.count()
	switch {
	case g.binding():
		return PhaseBinding
	case g.whole:
		return PhaseRunning
	case g.plan != nil:
		return PhasePlanned
	case !g.partialSince.IsZero():
		return PhaseBroken
	case g.size == 0 || counts.existing() < g.size:
		return PhaseIncomplete
	}
	return PhasePending
}

// HeldBinds counts the held binds.
func (mgr *Manager) HeldBinds() (n int) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for _, g := range mgr.gangs {
		if g.plan != nil {
			n += g.plan.arrived()
		}
	}
	return n
}

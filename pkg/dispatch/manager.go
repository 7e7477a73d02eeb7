package dispatch

import (
	"sync"
	"sync/atomic"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

const (
	// chargeLife is how long a pod that isn't bound keeps its charge and its place: much longer than kube-scheduler takes for a
	// new pod, and longer than its longest back-off by default (podMaxBackoffSeconds).
	chargeLife = 30 * time.Second
	// provisionLife is how long a pod that was granted for an autoscaler keeps its charge without a place: longer than
	// cluster-autoscaler waits for a node (max-node-provision-time).
	provisionLife = 20 * time.Minute
	// extension is how long a charge goes on if the pod is about to be bound when it ends.
	extension = 5 * time.Second
	// minPause is how long a pod waits after a charge that ended without a bind; it doubles each time, up to maxPause.
	minPause, maxPause = 10 * time.Second, 10 * time.Minute
	// retryInterval is how often all pods are tried on all nodes again, without a change that is known to help: leastRetries of
	// their kinds in a round at least, and so many that all have their turn in half of the interval.
	retryInterval             = 5 * time.Second
	leastRetries, retryRounds = 4, 25
	// maxOpen limits the granted pods that aren't bound yet. kube-scheduler binds some hundreds per second in a small cluster,
	// and some dozens in a large one: more would lose their charges before their turn comes there.
	maxOpen = 256
	// sharedOpen of these are for tenants with less than ownOpen each: pods that are never bound, such as those whose volume doesn't exist,
	// must not take all turns.
	sharedOpen, ownOpen = maxOpen / 2, maxOpen / 16
	// maxEffort limits the attempts of one round, since the events of the watch wait for it: after it the next tick goes on. An
	// attempt on all nodes counts as one, and finding the eligible nodes of some constraints as constraintsEffort. A tenant gets
	// ownEffort of it at most: others must not wait for thousands of pods that all differ.
	maxEffort, ownEffort, constraintsEffort = 1024, maxEffort / 2, 128
	// patience is how long a tenant's later pods may overtake one that doesn't fit. Then they wait for it, for maxWait at most.
	// If it still has no room then, patience doubles, maxDoublings times at most.
	patience, maxWait = time.Minute, 10 * time.Minute
	maxDoublings      = 5
)

// Options configure a Manager.
type Options struct {
	// Ledger reserves the places of granted pods.
	Ledger Ledger
	// Release releases a pod's reservation, unless a bind of the pod is in flight or unconfirmed.
	Release func(gpu.PodUID)
	View    ledger.View
	// Groups says which members of a group are granted together; nil if no pod has a Group.
	Groups Groups
	// EligibleNodes returns the nodes that pods with these Pod.Constraints can run on regardless of free resources.
	EligibleNodes func(constraints unique.Handle[string]) []string
	// Capacity returns a new count of what nodes have free besides GPU memory, with or without the held places. If Capacity is nil,
	// only GPU memory counts.
	Capacity func(withHeld bool) ledger.Capacity
	// EmptyCapacity returns a new count of what nodes would have besides GPU memory if no pod had GPU memory. If it is nil, only
	// GPU memory counts.
	EmptyCapacity func() ledger.Capacity
	// PriorityCutoff is the priority from which on pods need no turn.
	PriorityCutoff int32
	// Provisioning is how many pods are granted that fit nowhere now, and would fit an empty node, so that an autoscaler sees
	// them.
	Provisioning int
	// ReclaimAfter is how long a tenant must be below its share before pods of tenants above theirs are evicted for it; 0 means never.
	// Pods that have run for less than MinRuntime are not evicted.
	ReclaimAfter, MinRuntime time.Duration
	// Observer receives what metrics count. It is called with the Manager's lock held and must not block.
	Observer Observer
}

// Ledger is the part of package ledger that a Manager uses.
type Ledger interface {
	ReserveAll(requests []ledger.Request, yielding [][]gpu.PodUID, view ledger.View, capacity ledger.Capacity, at time.Time) ([]ledger.Reservation, int)
	Lookup(uid gpu.PodUID) (node string, allocation ledger.Allocation, ok bool)
	FitsEmpty(requests []ledger.Request, capacity ledger.Capacity) bool
	Hold(places []ledger.HeldPlace, priority int32)
	NodeMemory() map[string]gpu.Memory
}

// Groups is the part of package gang that a Manager uses.
type Groups interface {
	// Startable returns the unbound members that the group must bind together, none if too few exist; and those that are
	// placed alone.
	Startable(key gang.Key) (together, alone []gpu.PodUID)
}

// Observer receives what metrics count.
type Observer interface {
	// PodGranted is called for each granted pod, with the time since its creation.
	PodGranted(waited time.Duration)
	// ChargeExpired counts the charges that ended without a bind.
	ChargeExpired()
	// ReclaimFailed counts the units that got no room although pods were evicted for them.
	ReclaimFailed()
}

// Pod is a pod that asks for GPU memory, or has the gate.
type Pod struct {
	gpu.Pod
	Created time.Time
	// Node is the node that the pod is bound to; empty if it isn't bound.
	Node string
	// Bound is when it was bound, according to the extender that did it; zero if that is unknown.
	Bound time.Time
	Ended bool
	// Gated is true if the pod has the gate of fair shares, GatedOtherwise if it has others.
	Gated, GatedOtherwise bool
	// Group is the pod's group; zero if it has none.
	Group gang.Key
	// Constraints are equal for pods that can use the same nodes, Likeness for those that differ at most in the amount of GPU memory
	// and so fit the same free resources otherwise. A bound pod has no Likeness, and keeps its Constraints. Pods without Constraints
	// can use all nodes.
	Constraints, Likeness unique.Handle[string]
}

// awaitsBind reports whether the pod could still be bound.
func (p *Pod) awaitsBind() bool { return p.Node == "" && !p.Ended && !p.Leaving }

// Namespace is what a Manager knows of a namespace.
type Namespace struct {
	// Tenant is the tenant to which its pods belong.
	Tenant string
	fairshare.Terms
	// Free is true if its pods take no part in fair sharing.
	Free bool
}

// Effects are the actions that the caller of a Manager must perform.
type Effects struct {
	// Open are the pods whose gate must be removed. The result is passed to GateOpened.
	Open []gpu.Pod
	// Requeue is true if kube-scheduler must retry rejected pods: some of them have no gate, and were granted.
	Requeue bool
	// Reclaim is the room that must be made by evictions; nil for none. The result is passed to Reclaimed.
	Reclaim *reclaim.Need
}

// Manager holds the pods of all tenants. mu guards the fields below it and is held for in-memory work only.
type Manager struct {
	Options
	// places are the reservations that belong to the Manager. They have a lock of their own, because groups and capacities read
	// them while other locks are held.
	places places
	// admissions have a lock of their own, because filter calls read them.
	admissions admissions
	// freed are the nodes on which resources were freed since the latest Tick. nodesChanged is true if nodes changed since.
	freed        freedNodes
	nodesChanged atomic.Bool
	// regionsOutdated is true if nodes changed since the regions were computed.
	regionsOutdated atomic.Bool

	mu         sync.Mutex
	leading    bool
	namespaces map[string]Namespace
	pods       map[gpu.PodUID]*pod
	queue      fairshare.Queue
	units      map[string]*unit
	// pausing are the units that have a notBefore, of which there are few.
	pausing map[string]*unit
	// members are the pods that wait in groups.
	members map[gang.Key]map[gpu.PodUID]*pod
	// charged are the pods with a charge, none of which is bound as far as is known.
	charged map[gpu.PodUID]*pod
	// gated are the pods whose gate is to be opened.
	gated map[gpu.PodUID]*pod
	// eligible are the eligible nodes by Pod.Constraints.
	eligible map[unique.Handle[string]]*eligibleNodes
	// regions are nil if they must be computed again.
	regions *regions
	kinds   kinds
	// At retryAll the kinds that had no room become due to be tried on all nodes, retries of them in each round.
	due      []*kind
	retries  int
	retryAll time.Time
	// feasible keeps the results of everFits.
	feasible feasible
	// holding are the units for which the later ones of their tenants wait, by tenant.
	holding map[string]*unit
	// changed is true if a pod or a tenant changed since the latest round.
	changed bool
	// rounds counts the rounds, and effort the attempts of the present one. incomplete is true if the latest one has not tried all
	// units. freedAny is true if something was freed on a node since the former round.
	rounds     uint64
	effort     int
	freedAny   bool
	incomplete bool
	reclaims   reclaims
	// now is the time of the latest Tick as leader.
	now     time.Time
	effects Effects
}

// pod is a Pod with the state that a Manager keeps of it.
type pod struct {
	Pod
	// counted is the amount that the queue counts for the pod, as memory of countedFor.
	counted    gpu.Memory
	countedFor string
	// unit is the unit in which the pod waits; nil if it doesn't.
	unit *unit
	// charge is whether the pod was granted and isn't bound yet, and expires when that ends.
	charge  chargeState
	expires time.Time
	// started is when the pod was bound, see startedAt.
	started time.Time
	// failures counts the charges that ended without a bind. The pod isn't granted before notBefore.
	failures  int
	notBefore time.Time
	// gate is how far this process is with opening the pod's gate. It is not tried again before gateRetry.
	gate      gateState
	gateRetry time.Time
}

// chargeState is whether a pod has a charge.
//
//	uncharged → placed     the pod is granted with a place
//	uncharged → unplaced   the pod is granted for an autoscaler, while no node has room
//	unplaced  → placed     a node was added, and has room
//	any       → uncharged  the pod is bound, ended or changed, it was not bound in time, or the term ends
type chargeState int

const (
	uncharged chargeState = iota
	unplaced
	placed // Or it was, and has given up its place: see GiveUpPlace.
)

// charged reports whether the pod was granted and isn't bound yet.
func (p *pod) charged() bool { return p.charge != uncharged }

// gateState is how far this process is with opening a gate. That the gate is gone is known from the watch alone (Pod.Gated).
//
//	closed  → opening  openGates requests the write
//	opening → opened   the write was made
//	opening → closed   the write failed
//	any     → closed   the term ends: another leader opens it
type gateState int

const (
	gateClosed gateState = iota
	gateOpening
	gateOpened
)

// New returns a Manager without pods.
func New(o Options) *Manager {
	return &Manager{
		Options: o, namespaces: map[string]Namespace{}, pods: map[gpu.PodUID]*pod{}, units: map[string]*unit{}, pausing: map[string]*unit{},
		members: map[gang.Key]map[gpu.PodUID]*pod{}, charged: map[gpu.PodUID]*pod{}, gated: map[gpu.PodUID]*pod{},
		holding: map[string]*unit{}, eligible: map[unique.Handle[string]]*eligibleNodes{}, kinds: kinds{}, feasible: feasible{results: map[kindKey]bool{}},
		reclaims: newReclaims(0), admissions: admissions{free: map[string]bool{}, admitted: map[gpu.PodUID]bool{}},
	}
}

// Freed records that resources of the node were freed. It may be called with any lock held.
func (m *Manager) Freed(node string) { m.freed.add(node) }

// NodesChanged records that a node was added or removed, or that its labels, taints, allocatable resources or unschedulable
// mark changed. It takes no lock.
func (m *Manager) NodesChanged() {
	m.nodesChanged.Store(true)
	m.regionsOutdated.Store(true)
}

// TakeEffects returns the effects since the last call.
func (m *Manager) TakeEffects() Effects {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := m.effects
	m.effects = Effects{}
	return out
}

// SetNamespace adds or updates a namespace.
func (m *Manager) SetNamespace(name string, next Namespace) {
	m.mu.Lock()
	defer m.mu.Unlock()
	former, known := m.namespaces[name]
	if known && former == next {
		return
	}
	m.namespaces[name] = next
	m.admissions.setFree(name, next.Free)
	if !known || former.Tenant != next.Tenant || former.Free != next.Free {
		for _, p := range m.pods {
			if p.Namespace == name {
				m.withdraw(p)
				m.refresh(p)
				if next.Free && !p.Gated && p.awaitsBind() {
					m.effects.Requeue = true // Until now filter has rejected it.
				}
			}
		}
	}
	m.setTerms(next.Tenant)
	if known && former.Tenant != next.Tenant {
		m.setTerms(former.Tenant)
	}
	m.changed = true
}

// RemoveNamespace removes a namespace that was deleted. Its pods are deleted before, but the watch can report that later.
func (m *Manager) RemoveNamespace(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	former := m.namespaces[name]
	delete(m.namespaces, name)
	m.admissions.setFree(name, false)
	for _, p := range m.pods {
		if p.Namespace == name {
			m.withdraw(p)
		}
	}
	m.setTerms(former.Tenant)
}

// setTerms sets the terms of a tenant: the largest values of its namespaces. A tenant without namespaces is removed.
func (m *Manager) setTerms(tenant string) {
	terms, found := fairshare.DefaultTerms, false
	for _, ns := range m.namespaces {
		if ns.Tenant == tenant && !ns.Free {
			found = true
			terms.Weight, terms.Guaranteed = max(terms.Weight, ns.Weight), max(terms.Guaranteed, ns.Guaranteed)
		}
	}
	if m.queue.SetTerms(tenant, terms); !found {
		m.queue.Forget(tenant)
	}
}

// maxRequest bounds what is counted for a pod, so that sums over pods are exact: a user can bind a pod with any request to a node by
// spec.nodeName. More fits no card.
const maxRequest = fairshare.MaxGuaranteed

// SetPod adds or updates a pod, as the watch reports it.
func (m *Manager) SetPod(next Pod) {
	next.Request = min(next.Request, maxRequest)
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pods[next.UID]
	switch {
	case p == nil:
		p = &pod{}
		m.pods[next.UID] = p
	case p.Pod == next:
		return // Something else changed, such as a condition.
	default:
		m.withdraw(p)
	}
	// A place is for what the pod asked for then. Users can change its number of cards, and its node selector while it is gated.
	asksElse := next.Demand() != p.Demand() || next.Constraints != p.Constraints
	ran := p.Node != ""
	p.Pod = next
	if asksElse || !p.awaitsBind() {
		m.dropHold(p.UID)
		m.endCharge(p)
	}
	if p.Node != "" && !ran { // Otherwise startedAt finds it out.
		p.started = m.now
	}
	m.admissions.update(p)
	m.refresh(p)
}

// RemovePod removes a pod that was deleted. It does nothing for other pods.
func (m *Manager) RemovePod(uid gpu.PodUID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.pods[uid]
	if p == nil {
		return
	}
	m.withdraw(p)
	m.dropHold(uid)
	m.endCharge(p)
	tenant := p.countedFor
	m.count(p, 0)
	delete(m.gated, uid)
	delete(m.pods, uid)
	m.admissions.remove(uid)
	if _, known := m.namespaces[p.Namespace]; !known {
		m.setTerms(tenant) // The last pod of a namespace that is gone already.
	}
	m.changed = true
}

// refresh does what follows from the state of a pod that waits in no unit.
func (m *Manager) refresh(p *pod) {
	amount := gpu.Memory(0)
	if p.Node != "" && !p.Ended || p.charged() {
		amount = p.Request
	}
	m.count(p, amount)
	delete(m.gated, p.UID)
	if p.Gated && p.gate != gateOpened && p.awaitsBind() && (p.charged() || m.NeedsNoTurn(p.Pod.Pod)) {
		m.gated[p.UID] = p
	}
	if m.waits(p) {
		m.enlist(p)
	}
	m.changed = true
}

// waits reports whether the pod waits for its turn.
func (m *Manager) waits(p *pod) bool {
	_, known := m.namespaces[p.Namespace]
	return known && p.awaitsBind() && !p.charged() && !p.GatedOtherwise && !m.NeedsNoTurn(p.Pod.Pod)
}

// count makes the queue count the amount for the pod, as memory of its present tenant, which is the last one if its namespace is
// gone already.
func (m *Manager) count(p *pod, amount gpu.Memory) {
	ns, known := m.namespaces[p.Namespace]
	if !known && p.counted > 0 {
		ns.Tenant = p.countedFor
	}
	if ns.Free {
		amount = 0
	}
	if p.counted == amount && (amount == 0 || p.countedFor == ns.Tenant) {
		return
	}
	if p.counted > 0 {
		m.queue.Release(p.countedFor, p.counted)
	}
	if p.counted, p.countedFor = amount, ns.Tenant; amount > 0 {
		m.queue.Charge(ns.Tenant, amount)
	}
}

// StartLeading is called when this process becomes the leader.
func (m *Manager) StartLeading() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.leading, m.changed = true, true
}

// StopLeading is called while this process isn't the leader, and when it stops. It ends all charges.
func (m *Manager) StopLeading() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading {
		return
	}
	m.endAttempt()
	m.leading, m.effects, m.now, m.reclaims = false, Effects{}, time.Time{}, newReclaims(m.reclaims.attempts)
	for _, p := range m.charged {
		m.endCharge(p)
		m.refresh(p)
	}
	for _, p := range m.pods {
		p.failures, p.notBefore, p.gate, p.gateRetry = 0, time.Time{}, gateClosed, time.Time{}
	}
}

package dispatch

import (
	"sync"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
)

// Options configure a Manager.
type Options struct {
	// Ledger reserves the places of granted pods.
	Ledger *ledger.Ledger
	// Release releases a pod's reservation. If a bind of the pod is in flight or unconfirmed, its outcome decides instead.
	Release func(gpu.PodUID)
	View    ledger.View
	// Groups says which members of a group are granted together; nil if no pod has a Group.
	Groups Groups
	// Nodes knows which nodes pods can use regardless of free resources.
	Nodes Nodes
	// TurnRules knows which pods need no turn. The Manager sets its namespaces.
	*TurnRules
	// Provisioning is the number of items of each tenant that have no room and whose gates are opened nevertheless, so that an autoscaler
	// adds nodes for them.
	Provisioning int
	// Patience is how long a pod that isn't bound keeps its charge and its place.
	Patience time.Duration
	// ReclaimAfter is how long a tenant must be below its share before pods of tenants above theirs are evicted for it; 0 means never.
	// Pods that have run for less than MinRuntime are not evicted.
	ReclaimAfter, MinRuntime time.Duration
	// MayEvict reports whether evictions can begin now, and Evicting whether a pod is about to be evicted: then it counts as being
	// deleted. They must not wait for a call of the Manager.
	MayEvict func() bool
	Evicting func(gpu.PodUID) bool
	// Failures has the failures of all items, with those of package gang and of pods that need no turn.
	Failures *queue.Failures
	// Observer receives what metrics count. It is called with the Manager's lock held and must not block.
	Observer Observer
}

// Nodes is the part of package eligibility that a Manager uses. Pods are identified by their Pod.Constraints.
type Nodes interface {
	// UsableNodes returns the nodes that the pods can use. Pods that are alike share the slice, which lets the ledger rank the nodes once.
	UsableNodes(constraints unique.Handle[string]) []string
	// UsableAmong returns those of the nodes that the pods can use.
	UsableAmong(constraints unique.Handle[string], nodes []string) []string
}

// Groups is the part of package gang that a Manager uses.
type Groups interface {
	// Startable returns the unbound members of the group that may be placed.
	Startable(key gang.Key, now time.Time) gang.Startable
	// Surplus returns the bound members without which the group is still whole. They are single pods as victims.
	Surplus(key gang.Key) []gpu.PodUID
}

// Observer receives what metrics count.
type Observer interface {
	// PodGranted is called for each granted pod. waited is the time since the pod's creation.
	PodGranted(waited time.Duration)
	// ChargeExpired counts the charges that ended without a bind.
	ChargeExpired()
	// ReclaimFailed counts the items that got no room although pods were evicted for them.
	ReclaimFailed()
}

// Effects are the actions that the caller of a Manager must perform.
type Effects struct {
	// Open are the pods whose gate must be removed. The result is passed to GateOpened.
	Open []gpu.Pod
	// Requeue is true if kube-scheduler must retry rejected pods: pods without a gate were granted.
	Requeue bool
	// Reclaim is the search for pods that must be evicted; nil if there is none. The result is passed to Reclaimed.
	Reclaim *Search
}

// Manager holds the pods of all tenants. mu guards the fields below it and is held for in-memory work only.
type Manager struct {
	Options
	// admitted are the pods that are granted or bound. Filter calls read them without the lock, which is held for long in a large cluster.
	admitted sync.Map
	// freed are the nodes on which items may have got room since the latest Tick.
	freed freedNodes

	mu      sync.Mutex
	leading bool
	// now is the time of the latest Tick as leader.
	now     time.Time
	effects Effects

	namespaces map[string]Namespace
	// pods are all pods, inNamespace those of each namespace, and members those that wait in groups.
	pods        map[gpu.PodUID]*pod
	inNamespace map[string]map[gpu.PodUID]*pod
	members     map[gang.Key]map[gpu.PodUID]*pod
	// charged are the pods with a charge, of which none is known to be bound; gated those whose gate is to be opened; allocated those that have
	// memory.
	charged   map[gpu.PodUID]*pod
	gated     map[gpu.PodUID]*pod
	allocated map[gpu.PodUID]*allocatedPod
	// kept is the memory that is kept for each tenant, the oldest first. ended is the memory of pods that have ended since the latest round.
	kept  map[string][]*kept
	ended []*kept

	// queue has the tenants and the items that wait, which items has by ID.
	queue fairshare.Queue
	items map[string]*item
	kinds map[unique.Handle[string]]*kind

	// rounds counts the rounds, and roundAt is when the latest one was. unfinished are the tenants of which it has not tried all items that were due.
	// changed is true if a pod or a tenant changed since.
	rounds     uint64
	roundAt    time.Time
	unfinished map[string]*searches
	changed    bool
	// checked is when dueStandings last did something.
	checked  time.Time
	reclaims reclaims
}

// New returns a Manager without pods.
func New(o Options) *Manager {
	return &Manager{
		Options: o, namespaces: map[string]Namespace{},
		pods: map[gpu.PodUID]*pod{}, inNamespace: map[string]map[gpu.PodUID]*pod{}, members: map[gang.Key]map[gpu.PodUID]*pod{},
		charged: map[gpu.PodUID]*pod{}, gated: map[gpu.PodUID]*pod{}, allocated: map[gpu.PodUID]*allocatedPod{},
		items: map[string]*item{}, kinds: map[unique.Handle[string]]*kind{}, unfinished: map[string]*searches{}, reclaims: newReclaims(),
		kept: map[string][]*kept{},
	}
}

// Freed records that resources of the node were freed, or that the node was added or changed. It may be called with any lock held.
func (m *Manager) Freed(node string) { m.freed.add(node) }

// TakeEffects returns the effects since the last call.
func (m *Manager) TakeEffects() Effects {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := m.effects
	m.effects = Effects{}
	return out
}

// StartLeading is called while this process is the leader, before Tick.
func (m *Manager) StartLeading() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.changed = m.changed || !m.leading
	m.leading = true
}

// StopLeading is called while this process isn't the leader, and when it stops. It ends all charges.
func (m *Manager) StopLeading() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading {
		return
	}
	m.endHolds(func(*hold) bool { return true })
	m.leading, m.effects, m.now, m.checked, m.reclaims = false, Effects{}, time.Time{}, time.Time{}, newReclaims()
	m.endKept(func(*kept) bool { return true })
	m.ended = nil
	for _, p := range m.pods {
		m.withdraw(p)
		m.endCharge(p, false)
		p.failedAt, p.provisioning = time.Time{}, time.Time{}
		m.refresh(p)
		p.gate, p.gateRetry = gateClosed, time.Time{}
	}
}

package ledger

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// NoRoomError is returned if a pod doesn't fit a node.
type NoRoomError struct {
	Node   string
	Reason reasons.Reason
}

func (e *NoRoomError) Error() string { return fmt.Sprintf("node %s: %s", e.Node, e.Reason.Text()) }

// State is the state of an allocation.
type State int

const (
	// Assumed means that a card is chosen and the API server has not confirmed the bind yet. The bind is in flight or
	// unconfirmed, or has not begun: the card was chosen by a gang's plan or by fair sharing.
	Assumed State = iota
	// Bound means that the API server has the pod on its node.
	Bound
)

// String returns the state's name.
func (s State) String() string {
	if s == Assumed {
		return "assumed"
	}
	return "bound"
}

// Allocation is what a pod holds of a node's cards. The ledger returns copies.
type Allocation struct {
	gpu.Pod
	State State
	// Placement is empty for a presumed allocation that fits no card.
	Placement gpu.Placement
	// Presumed is true for a bound pod whose annotations name no card. The ledger counts it on the card on which the node
	// is likely to place it. Its placement changes if another allocation takes the memory there, or when the annotations
	// name a card.
	Presumed bool
	// AssumeTime is when the card was chosen; zero if unknown.
	AssumeTime time.Time
}

// NodeSpec is the part of a node that its Node object determines.
type NodeSpec struct {
	// WholeCards is true if the node also offers whole cards to pods. No pod is placed on such a node. Like Support it is read for every node and pod,
	// so both are first in memory.
	WholeCards bool
	// Support is what the node can give to pods.
	placement.Support
	Unit gpu.Unit
	// Cards are ordered by index; each index occurs once.
	Cards []gpu.Card
	// Isolation is the node's isolation mode, for display only; empty if shares are not enforced.
	Isolation string
	// Simulated is true if the cards don't exist, for display only.
	Simulated bool
	// Pool is the pool to which the node belongs, for display only; empty if unknown.
	Pool string
	// Closed is the reason why no new pod can run on the node at present (cordoned, not ready). It is for display only:
	// kube-scheduler decides which nodes a pod may use.
	Closed string
	// Problems are what is wrong with the node as far as its Node object says, for display only. diagnosis.NodeProblems returns all.
	Problems []reasons.NodeProblem
}

// Node is a node with its allocations. The ledger returns copies.
type Node struct {
	Name string
	// Gone is true for a node that has allocations only: the ledger knows no Node object that shares its cards, or should.
	Gone bool
	NodeSpec
	// Used, UsedCores and Containers are the allocated memory, cores and containers of each card, in the order of Cards. They can exceed
	// what the card has, if pods were bound without this ledger.
	Used       []gpu.Memory
	UsedCores  []gpu.Cores
	Containers []int32
	// Allocations are the node's allocations by namespace and name, including those on cards that no longer exist.
	Allocations []Allocation
}

// Ledger holds the allocations of a cluster. Its methods are safe for concurrent use: mu guards everything. It is held for in-memory work only. The
// caller's code runs under it only in Resources and Turns.
type Ledger struct {
	freedListeners []func(node string)
	resources      Resources
	// turns is nil if fair sharing is off.
	turns Turns

	mu    sync.RWMutex
	nodes map[string]*node
	// nodeOf maps each pod with an allocation to its node. A pod has an allocation on at most one node.
	nodeOf       map[gpu.PodUID]string
	reservations reservations
	// tentative are ordered by age.
	tentative []*tentativePlacement
	// outlook is what Expect has set last; nil if nothing is expected.
	outlook *placement.Outlook
	// revision is incremented by every change of a node, see ChangesSince. forgotten is the revision of the last change that
	// removed a node.
	revision, forgotten uint64
}

// New returns an empty ledger that counts only GPU memory.
func New() *Ledger { return NewWithResources(nil, nil) }

// NewWithResources returns an empty ledger whose reservations also keep the other resources of nodes. resources is nil if only GPU memory counts, turns
// if fair sharing is off.
func NewWithResources(resources Resources, turns Turns) *Ledger {
	if resources == nil {
		resources = memoryOnly{}
	}
	return &Ledger{
		resources: resources, turns: turns,
		nodes:  map[string]*node{},
		nodeOf: map[gpu.PodUID]string{}, reservations: newReservations(),
	}
}

// AddFreedListener adds a function that is called when a pod may fit a node that it didn't fit before: an allocation or a reservation ended, or doesn't
// count any more; or the node's object has changed. Tentative placements don't count, because they never make Filter reject a pod. The listener can also
// be called when no pod fits. The goroutine that made the change calls it without the lock. Listeners must be added before several goroutines use the
// ledger.
func (l *Ledger) AddFreedListener(listener func(node string)) {
	l.freedListeners = append(l.freedListeners, listener)
}

// SetNode sets the cards of a node. Allocations stay, including those on cards that no longer exist.
func (l *Ledger) SetNode(name string, spec NodeSpec) {
	l.edit(func(e *edit) {
		e.alter(name, func(n *node) { n.setSpec(spec) })
		e.freed = append(e.freed, name) // What the node accepts, or has, may be more.
	})
}

// DeleteNode removes the cards of a node. Its allocations stay until their pods are gone, so that they still count when
// the Node object is deleted and created again.
func (l *Ledger) DeleteNode(name string) {
	l.edit(func(e *edit) {
		if l.nodes[name] != nil {
			e.alter(name, (*node).clearSpec)
		}
	})
}

// assume adds an assumed allocation.
func (e *edit) assume(name string, pod gpu.Pod, where gpu.Placement, at time.Time) *Allocation {
	e.freed = append(e.freed, e.nodesReservedFor(pod.UID)...)
	a := &Allocation{Pod: pod, State: Assumed, Placement: where, AssumeTime: at}
	e.alter(name, func(n *node) { n.allocations[pod.UID] = a })
	e.nodeOf[pod.UID] = name
	e.placedFor(pod.UID) // It is made if there is none.
	return a
}

// Release removes the pod's assumed allocation, unless a bind of the pod has begun (BeginBind). A bound one stays. It reports whether an
// allocation was removed.
func (l *Ledger) Release(uid gpu.PodUID) bool {
	return l.remove(uid, func(a *Allocation) bool { return a.State == Assumed && !l.isBinding(uid) })
}

// Remove removes the pod's allocation, once the pod is gone or has ended. It reports whether there was one.
func (l *Ledger) Remove(uid gpu.PodUID) bool {
	return l.remove(uid, func(*Allocation) bool { return true })
}

// SetBound sets the bound allocation of a pod as the API server reports it, or as its Binding was written. It replaces an assumed
// allocation, never fails, and can exceed a card's memory. If where is empty the card is unknown: the allocation is then presumed, on the
// card of the pod's former allocation on this node, or else on the card on which the node is likely to place the pod. SetBound of what the ledger
// has already changes no node.
func (l *Ledger) SetBound(name string, pod gpu.Pod, where gpu.Placement, assumed time.Time) {
	l.edit(func(e *edit) {
		defer l.endTentative(pod.UID)
		defer l.endPlaced(pod.UID)
		if l.hasBound(name, pod, where, assumed) { // As after most events of the watch.
			return
		}
		home, allocated := l.nodeOf[pod.UID]
		if !allocated {
			e.freed = l.nodesReservedFor(pod.UID)
		} else if home != name {
			e.unplace(pod.UID)
		}
		e.alter(name, func(n *node) {
			a := &Allocation{Pod: pod, State: Bound, Placement: slices.Clone(where), Presumed: len(where) == 0, AssumeTime: assumed}
			if before := n.allocations[pod.UID]; before != nil && a.Presumed {
				a.Placement = before.Placement
			}
			n.allocations[pod.UID] = a
			l.nodeOf[pod.UID] = name
		})
	})
}

// hasBound reports whether the ledger has this bound allocation. The caller holds the lock.
func (l *Ledger) hasBound(name string, pod gpu.Pod, where gpu.Placement, assumed time.Time) bool {
	a := l.allocation(pod.UID)
	return a != nil && l.nodeOf[pod.UID] == name && a.State == Bound && !a.Presumed && a.Pod == pod &&
		slices.Equal(a.Placement, where) && a.AssumeTime.Equal(assumed)
}

// allocated reports whether the pod has an allocation. The caller holds the lock.
func (l *Ledger) allocated(uid gpu.PodUID) bool {
	_, allocated := l.nodeOf[uid]
	return allocated
}

// Lookup returns the pod's allocation and its node.
func (l *Ledger) Lookup(uid gpu.PodUID) (string, Allocation, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	a := l.allocation(uid)
	if a == nil {
		return "", Allocation{}, false
	}
	return l.nodeOf[uid], a.copy(), true
}

// Node returns one node with its allocations.
func (l *Ledger) Node(name string) (Node, bool) {
	nodes := l.read([]string{name})
	if len(nodes) == 0 {
		return Node{}, false
	}
	return nodes[0], true
}

// Nodes returns every node, by name. It takes the lock once per node, see eachNode.
func (l *Ledger) Nodes() []Node { return l.read(l.names()) }

// NumNodes returns the number of nodes.
func (l *Ledger) NumNodes() int {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return len(l.nodes)
}

// names returns the names of all nodes, sorted.
func (l *Ledger) names() []string {
	l.mu.RLock()
	names := slices.AppendSeq(make([]string, 0, len(l.nodes)), maps.Keys(l.nodes))
	l.mu.RUnlock()
	slices.Sort(names)
	return names
}

// eachNode calls visit for those of the named nodes that still exist. It takes the lock once per node, so that decisions don't wait for all visits. Each
// node is consistent, but a pod that changes its node during the call can be on neither node or on both.
func (l *Ledger) eachNode(names []string, visit func(*node)) {
	locked := func(name string) {
		l.mu.RLock()
		defer l.mu.RUnlock()
		if n := l.nodes[name]; n != nil {
			visit(n)
		}
	}
	for _, name := range names {
		locked(name)
	}
}

// read returns those of the named nodes that still exist.
func (l *Ledger) read(names []string) []Node {
	nodes := make([]Node, 0, len(names))
	l.eachNode(names, func(n *node) { nodes = append(nodes, n.copy()) })
	return nodes
}

// NodeCards is a node's cards without its allocations.
type NodeCards struct {
	Name string
	// Unit is the node's unit, or a guess from the cards' sizes if the node doesn't report one.
	Unit   gpu.Unit
	Closed string
	Cards  []placement.Card
	// Support is that of NodeSpec.
	placement.Support
	// Requested is the sum of the allocations' requests, with those whose card is unknown or gone.
	Requested gpu.Memory
	// Leaving are the allocations of pods that are being deleted, by namespace and name.
	Leaving []Allocation
	// Nominees are the nominated pods that have no allocation yet, in descending order of priority, with the cards that they are likely to get;
	// none if that is unknown.
	Nominees []Place
}

// NodeCards returns the nodes that have cards, by name. It costs much less than Nodes, and takes the lock in the same way.
func (l *Ledger) NodeCards() []NodeCards {
	names := l.names()
	out := make([]NodeCards, 0, len(names))
	l.eachNode(names, func(n *node) {
		if len(n.cards) > 0 {
			out = append(out, l.nodeCards(n))
		}
	})
	return out
}

// nodeCards returns the NodeCards of one node.
func (l *Ledger) nodeCards(n *node) NodeCards {
	out := NodeCards{
		Name: n.name, Unit: n.unit(), Closed: n.spec.Closed, Cards: slices.Clone(n.cards),
		Support: n.spec.Support,
	}
	out.Requested, out.Leaving = n.requests()
	slices.SortFunc(out.Leaving, compareAllocations)
	cards := out.Cards
	for i, nominee := range n.nominees() {
		if i == 0 {
			cards = slices.Clone(cards)
		}
		if !l.allocated(nominee.Pod.UID) {
			where := n.expected(&nominee, cards)
			placement.Use(cards, where)
			out.Nominees = append(out.Nominees, Place{Pod: nominee.Pod, Node: n.name, On: where})
		}
	}
	return out
}

// NodeMemory returns the memory of each node that shares its cards, in the node's unit, without what is free on unhealthy cards.
func (l *Ledger) NodeMemory() map[string]gpu.Memory {
	l.mu.RLock()
	defer l.mu.RUnlock()
	out := make(map[string]gpu.Memory, len(l.nodes))
	for name, n := range l.nodes {
		if n.shareable() == reasons.Fits {
			totals := placement.Sum(n.cards)
			out[name] = totals.Memory.Sub(totals.Free.Sub(totals.FreeHealthy))
		}
	}
	return out
}

// remove removes the pod's allocation if may returns true for it.
func (l *Ledger) remove(uid gpu.PodUID, may func(*Allocation) bool) (removed bool) {
	l.edit(func(e *edit) {
		l.endTentative(uid)
		if a := l.allocation(uid); a != nil && may(a) {
			e.drop(uid)
			removed = true
		}
	})
	return removed
}

// edit is a change of nodes in one step. The ledger's lock is held throughout.
type edit struct {
	*Ledger
	// freed are nodes on which pods may fit that didn't fit before.
	freed []string
}

// edit makes a change under the lock. Then it calls the freed listeners, without the lock.
func (l *Ledger) edit(change func(e *edit)) {
	e := &edit{Ledger: l}
	locked := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		change(e)
	}
	locked()
	slices.Sort(e.freed)
	for _, node := range slices.Compact(e.freed) {
		for _, listener := range l.freedListeners {
			listener(node)
		}
	}
}

// alter changes a node, which it adds if there is none of the name, and recounts it. A node that has neither an object nor allocations any more is
// removed.
func (e *edit) alter(name string, how func(*node)) *node {
	n := e.nodes[name]
	if n == nil {
		n = e.addNode(name)
	}
	cards := slices.Clone(n.cards)
	how(n)
	n.recount()
	e.markChanged(n)
	// The card that a nominated pod is likely to get can be another one since, see expected.
	if n.usesLessThan(cards) || len(n.nominees()) > 0 {
		e.freed = append(e.freed, name)
	}
	if !n.sharesCards && len(n.allocations) == 0 {
		delete(e.nodes, name)
		e.forgotten = e.revision
	}
	return n
}

// unplace removes the pod's allocation, but not its reservation.
func (e *edit) unplace(uid gpu.PodUID) *node {
	n := e.alter(e.nodeOf[uid], func(n *node) { delete(n.allocations, uid) })
	delete(e.nodeOf, uid)
	return n
}

// drop removes the pod's allocation.
func (e *edit) drop(uid gpu.PodUID) {
	e.unplace(uid)
	e.endPlaced(uid)
}

func (l *Ledger) addNode(name string) *node {
	n := &node{name: name, allocations: map[gpu.PodUID]*Allocation{}, freeResources: unlimited, allResources: unlimited}
	l.nodes[name] = n
	for _, items := range l.reservations.items {
		for _, r := range items {
			for _, place := range r.Places {
				if place.Node == name {
					n.addReserved(r, place)
				}
			}
		}
	}
	return n
}

// allocation returns the pod's allocation, nil if it has none. The caller holds the lock.
func (l *Ledger) allocation(uid gpu.PodUID) *Allocation {
	name, allocated := l.nodeOf[uid]
	if !allocated {
		return nil
	}
	return l.nodes[name].allocations[uid]
}

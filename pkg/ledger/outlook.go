package ledger

import (
	"math"
	"slices"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// unlimited is what a node has, and has free, of which SetNodeResources has reported nothing.
var unlimited = placement.NodeResources{CPU: math.MaxInt64, NodeMemory: math.MaxInt64}

// SetNodeResources sets what the node has free beside its cards and what it has of that for pods, for views by cost.
func (l *Ledger) SetNodeResources(name string, free, all placement.NodeResources) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := l.nodes[name]; n != nil && (n.freeResources != free || n.allResources != all) {
		n.freeResources, n.allResources = free, all
		n.costs.Store(nil)
	}
}

// Expect sets which kinds of pods are expected, and how many pods end for each one that comes, for views by cost. It makes a new outlook from the
// present state of the nodes; without kinds or nodes there is none, and views by cost are by binpack. cardPolicy chooses the cards of a node, and
// usable returns the nodes that pods with such constraints can use. Expect takes the lock once for each node, and at the end for the references to the
// results; it computes without the lock.
func (l *Ledger) Expect(kinds []placement.Kind, turnover float64, cardPolicy placement.Policy, usable func(constraints unique.Handle[string]) []string) {
	states := l.nodeStates()
	if len(kinds) == 0 || len(states) == 0 {
		l.setOutlook(nil, nil)
		return
	}
	exclude(states, kinds, usable)
	rooms := make([]placement.NodeRoom, len(states))
	for i := range states {
		rooms[i] = states[i].NodeRoom
	}
	outlook := placement.NewOutlook(kinds, turnover, cardPolicy, rooms)
	for i := range states {
		if i > 0 && states[i].Equal(&states[i-1].NodeRoom) {
			states[i].costs = states[i-1].costs
		} else {
			states[i].costs = outlook.Costs(&states[i].NodeRoom)
		}
	}
	l.setOutlook(outlook, states)
}

// nodeState is what a node's costs depend on, at one moment. The cards are copied.
type nodeState struct {
	name string
	unit gpu.Unit
	// NodeRoom's Excluded is for the outlook.
	placement.NodeRoom
	outlook *placement.Outlook
	// revision is the node's. It doesn't count changes of what is free beside the cards.
	revision uint64
	costs    *placement.Costs
}

// nodeStates returns the states of the nodes that share their cards.
func (l *Ledger) nodeStates() (states []nodeState) {
	l.eachNode(l.names(), func(n *node) {
		if n.shareable() == reasons.Fits {
			states = append(states, nodeState{name: n.name, unit: n.unit(), NodeRoom: *n.nodeRoom(slices.Clone(n.cards)), outlook: l.outlook, revision: n.revision})
		}
	})
	return states
}

// exclude sets the nodes' Excluded. Most kinds have the same constraints as others.
func exclude(states []nodeState, kinds []placement.Kind, usable func(unique.Handle[string]) []string) {
	var all uint64
	byConstraints := map[unique.Handle[string]]uint64{}
	for i := range kinds[:min(len(kinds), placement.MaxKinds)] {
		all |= 1 << i
		byConstraints[kinds[i].Constraints] |= 1 << i
	}
	positions := make(map[string]int, len(states))
	for i := range states {
		positions[states[i].name], states[i].Excluded = i, all
	}
	for constraints, bits := range byConstraints {
		for _, name := range usable(constraints) {
			if i, known := positions[name]; known {
				states[i].Excluded &^= bits
			}
		}
	}
}

// setOutlook sets the outlook, and the costs of the nodes that haven't changed since their states were read. It compares no cards: the lock is held for
// all nodes.
func (l *Ledger) setOutlook(outlook *placement.Outlook, states []nodeState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.outlook = outlook
	for _, n := range l.nodes {
		n.excluded = 0
		n.costs.Store(nil)
	}
	for i := range states {
		if n := l.nodes[states[i].name]; n != nil {
			n.excluded = states[i].Excluded
			if n.revision == states[i].revision && n.freeResources == states[i].NodeResources && n.allResources == states[i].All {
				n.costs.Store(states[i].costs)
			}
		}
	}
}

// noKind is the kind of a pod if the view isn't by cost, or nothing is expected yet.
const noKind = -1

// kindOf returns the pod's kind in the outlook, and whether that has exactly the pod's shape. The caller holds the lock.
func (l *Ledger) kindOf(view *View, pod *gpu.Pod) (kind int, exact bool) {
	if !view.Node.NeedsOutlook() || l.outlook == nil {
		return noKind, true
	}
	shape := l.shapeOf(pod)
	return l.outlook.KindOf(&shape)
}

// shapeOf returns what the pod asks for; only its demand if the rest isn't known.
func (l *Ledger) shapeOf(pod *gpu.Pod) placement.Shape {
	if shape, known := l.resources.Shape(pod.UID); known {
		return shape
	}
	return placement.Shape{Demand: pod.Demand()}
}

// maxRefined is the number of nodes for which a cost is computed for the pod's own shape.
const maxRefined = 64

// refine rates the most suitable of the named nodes that fit again, by the pod's own shape instead of its kind. All others then suit less.
func (l *Ledger) refine(view *View, a *asker, names []string, fitting []placement.Candidate) {
	shape, seen := l.shapeOf(a.pod), map[placement.Suitability]bool{}
	var best []placement.Candidate // By their positions in fitting.
	for i := range fitting {
		c := &fitting[i]
		// Of many nodes that are equal, such as empty ones, the first is enough.
		if len(names) <= maxRefined || !seen[c.Suits] {
			seen[c.Suits] = true
			best = append(best, placement.Candidate{Node: i, Suits: c.Suits})
		}
		c.Suits = 0
	}
	slices.SortFunc(best, placement.Candidate.Compare)
	for _, b := range best[:min(len(best), maxRefined)] {
		c := &fitting[b.Node]
		n := l.nodes[names[c.Node]]
		c.Suits = placement.SuitsByCost(l.outlook.Cost(n.nodeRoom(l.cardsInView(n, view, a)), &shape))
	}
}

// suitabilityByCost returns how well the node suits a pod of that kind, for which it has room. The costs are computed if the node or the outlook has
// changed since the last call. The caller holds the lock, at least for reading.
func (l *Ledger) suitabilityByCost(n *node, kind int) placement.Suitability {
	costs := n.costs.Load()
	if costs == nil {
		costs = l.outlook.Costs(n.nodeRoom(n.cards))
		n.costs.Store(costs) // Another reader can store the same costs at the same time.
	}
	return placement.SuitsByCost(costs[kind])
}

// nodeRoom returns what the node has free if its cards are these.
func (n *node) nodeRoom(cards []placement.Card) *placement.NodeRoom {
	return &placement.NodeRoom{Cards: cards, NodeResources: n.freeResources, All: n.allResources, Excluded: n.excluded}
}

// StrandedNode is a node with free memory that pods of no expected kind can use, because of what the node lacks.
type StrandedNode struct {
	Name string
	Unit gpu.Unit
	placement.Stranded
}

// Stranded is the free memory that pods of no expected kind can use, because of what nodes lack.
type Stranded struct {
	// Nodes are those that have such memory, by name.
	Nodes []StrandedNode
	// Ratios are its parts of the memory of all shared cards; nil if nothing is expected.
	Ratios map[placement.Shortage]float64
}

// Stranded returns the memory that is stranded. It takes the lock once for each node.
func (l *Ledger) Stranded() Stranded {
	out, all := Stranded{Ratios: map[placement.Shortage]float64{}}, 0.0 // In bytes: nodes can have different units.
	for _, state := range l.nodeStates() {
		if state.outlook == nil {
			return Stranded{}
		}
		for i := range state.Cards {
			all += float64(state.unit.Bytes(state.Cards[i].Memory))
		}
		stranded := state.outlook.Stranded(&state.NodeRoom)
		for shortage, memory := range stranded {
			out.Ratios[placement.Shortage(shortage)] += float64(state.unit.Bytes(memory))
		}
		if stranded != (placement.Stranded{}) {
			out.Nodes = append(out.Nodes, StrandedNode{state.name, state.unit, stranded})
		}
	}
	for shortage := range out.Ratios {
		out.Ratios[shortage] /= max(all, 1)
	}
	return out
}

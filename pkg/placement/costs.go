package placement

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Costs are what a pod of each kind costs on a node, see Outlook.Cost.
type Costs [MaxKinds]float64

// Costs returns the costs on the node.
func (o *Outlook) Costs(n *NodeRoom) *Costs {
	costs, b := new(Costs), o.baselineOf(n)
	for i := range o.kinds {
		costs[i] = o.cost(b, &o.kinds[i].Shape)
	}
	return costs
}

// CostOf is Cost for a kind. It is faster than Costs.
func (o *Outlook) CostOf(n *NodeRoom, kind int) float64 { return o.Cost(n, &o.kinds[kind].Shape) }

// Cost returns what a pod of that shape costs on the node: what the node's room is worth less with it. Of a pod that fits too few cards, the emptiest
// cards count, and as much as there is room for.
func (o *Outlook) Cost(n *NodeRoom, pod *Shape) float64 { return o.cost(o.baselineOf(n), pod) }

func (o *Outlook) cost(b *baseline, pod *Shape) float64 {
	if pod.Cards == 0 {
		return b.valueLost(pod, nil)
	}
	var buffer [usualCards]pick
	chosen := o.cardPolicy.choose(b.node.Cards, &pod.Demand, buffer[:0])
	if len(chosen) < pod.Cards {
		chosen = Spread.choose(b.node.Cards, &gpu.Demand{Cards: pod.Cards, Memory: 1}, buffer[:0])
	}
	return b.valueLost(pod, chosen)
}

// baseline is a node before a placement, with what the costs of all placements have in common. Amounts are floating-point numbers, see whole.
type baseline struct {
	node *NodeRoom
	// perEmptiness is the sum over the kinds that could use the node once it is empty, free and all are what NodeRoom.memory returns.
	perEmptiness, free, all float64
	// rooms are what the node has for the kinds for which it has any.
	rooms []kindRoom
}

// changedCard is a card with a placement.
type changedCard struct {
	Card
	position int
	// before and after are what is free without and with it.
	before, after float64
}

func (o *Outlook) baselineOf(n *NodeRoom) *baseline {
	b, on := &baseline{node: n}, make([]float64, len(o.kinds)*len(n.Cards))
	b.free, b.all = n.memory()
	for i := range o.kinds {
		kind := &o.kinds[i]
		if kind.perEmptiness > 0 && n.usableOnceEmpty(i, kind) {
			b.perEmptiness += kind.perEmptiness
		}
		if room := n.roomFor(i, kind, on[i*len(n.Cards):][:len(n.Cards)]); room.pods > 0 {
			b.rooms = append(b.rooms, room)
		}
	}
	return b
}

// valueLost returns what the node is worth less if the pod is placed on the chosen cards.
func (b *baseline) valueLost(pod *Shape, chosen []pick) (cost float64) {
	if missesAdapter(b.node.Cards, chosen, &pod.Demand) {
		cost = 1e-9 // So little that it decides only between equal nodes.
	}
	left := NodeResources{CPU: b.node.CPU - pod.CPU, NodeMemory: b.node.NodeMemory - pod.NodeMemory}.amounts()
	var buffer [usualCards]changedCard
	changed, taken := buffer[:0], 0.0
	for _, p := range chosen {
		c := changedCard{Card: b.node.Cards[p.position], position: p.position}
		c.before = float64(c.Free())
		c.Add(gpu.Share{Memory: pod.Memory, Cores: pod.Cores, Containers: pod.Containers})
		c.after = float64(c.Free())
		changed, taken = append(changed, c), taken+c.before-c.after
	}
	for i := range b.rooms {
		cost += b.rooms[i].valueLost(changed, &left)
	}
	return cost + b.emptiness(taken)
}

// valueLost returns what the room is worth less. left is what is free beside the cards after the placement.
func (r *kindRoom) valueLost(changed []changedCard, left *amounts) float64 {
	k, on, shares, memory := r.kind, r.sharesByCard, r.shares, r.memory
	if k.Cards > 1 {
		on = slices.Clone(on)
	}
	for i := range changed {
		c := &changed[i]
		had := r.sharesByCard[c.position]
		if had == 0 {
			continue
		}
		has := k.sharesOf(&c.Card, c.after)
		shares += has - had
		memory -= c.before
		if has > 0 {
			memory += c.after
		}
		if k.Cards > 1 {
			on[c.position] = has
		}
	}
	return k.worth(r.pods, r.memory) - k.worth(k.podsOf(on, shares, left), memory)
}

// emptiness returns what the node is worth less because it is less empty with a placement that takes so much memory. If pods end, a node that few
// pods use becomes empty before long, and then has room for kinds with several cards. So pods go to nodes that are in use already, the more so
// the more these are used, and to nodes that are too small for these kinds.
func (b *baseline) emptiness(taken float64) float64 {
	if b.perEmptiness == 0 || taken == 0 {
		return 0
	}
	after := b.free - taken
	return b.perEmptiness * (b.free*b.free - after*after) / b.all
}

// worth returns what that much room for the kind is worth. Room counts by its part of all room for the kind, so what is scarce is worth more.
func (k *weighedKind) worth(pods, memory float64) float64 {
	if pods == 0 {
		return 0
	}
	return k.perPod*pods + k.perMemory*memory
}

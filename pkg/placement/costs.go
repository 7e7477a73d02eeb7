package placement

import (
	"github.com/gpushare/gpushare/pkg/gpu"
)

// Costs are what a pod of each kind costs on a node: what the node's room is worth less with the pod. The cost is notFitting if too few cards have
// room for such a pod.
type Costs [MaxKinds]float64

const notFitting = -1

// Costs returns the costs on the node.
func (o *Outlook) Costs(n *NodeRoom) *Costs {
	costs, b := new(Costs), o.before(n)
	for i := range o.kinds {
		if kind := &o.kinds[i].Shape; b.choose(&o.cardPolicy, kind) {
			costs[i] = b.lost(kind)
		} else {
			costs[i] = notFitting
		}
	}
	return costs
}

// Of returns the cost of a pod of that kind; false if too few cards have room for such a pod.
func (c *Costs) Of(kind int) (cost float64, fits bool) { return c[kind], c[kind] != notFitting }

// CostOf returns what a pod of that kind costs on the node. It is faster than Costs for one kind. Of a pod that doesn't fit, so much counts as there
// is room for.
func (o *Outlook) CostOf(n *NodeRoom, kind int) float64 { return o.Cost(n, &o.kinds[kind].Shape) }

// Cost is CostOf for any shape. Of a pod that fits too few cards, the emptiest cards count.
func (o *Outlook) Cost(n *NodeRoom, pod *Shape) float64 {
	b := o.before(n)
	if !b.choose(&o.cardPolicy, pod) {
		any := Shape{Demand: gpu.Demand{Cards: pod.Cards, Memory: 1}}
		b.choose(&Spread, &any)
	}
	return b.lost(pod)
}

// before is a node before a placement, with what the costs of all placements have in common. Amounts are floating-point numbers, see whole.
type before struct {
	node *NodeRoom
	// perEmptiness is that of the outlook, free and all what NodeRoom.memory returns.
	perEmptiness, free, all float64
	// rooms are what the node has for the kinds for which it has any.
	rooms []worthRoom
	// chosen are the positions of the cards of a placement, and changed these cards after it.
	chosen  []pick
	changed []changedCard
}

// worthRoom is what a node has for a kind.
type worthRoom struct {
	room
	kind  *weighed
	worth float64
	// on is how many shares each card has free.
	on []float64
}

// changedCard is a card with a placement.
type changedCard struct {
	Card
	position int
	// before and after are what is free without and with it.
	before, after float64
}

func (o *Outlook) before(n *NodeRoom) *before {
	b := &before{
		node: n, perEmptiness: o.emptiness, rooms: make([]worthRoom, 0, len(o.kinds)), chosen: make([]pick, 0, len(n.Cards)), changed: make([]changedCard, 0, len(n.Cards)),
	}
	b.free, b.all = n.memory()
	shares := make([]float64, len(n.Cards)*len(o.kinds))
	for i := range o.kinds {
		r := worthRoom{kind: &o.kinds[i], on: shares[:0:len(n.Cards)]}
		if r.room = n.roomFor(i, r.kind, &r.on); r.pods > 0 {
			r.worth = r.kind.worth(r.pods, r.memory)
			b.rooms, shares = append(b.rooms, r), shares[len(n.Cards):]
		}
	}
	return b
}

// choose chooses the cards for the pod. It returns false if it finds too few.
func (b *before) choose(policy *Policy, pod *Shape) bool {
	b.chosen = b.chosen[:0]
	if pod.Cards > 0 {
		b.chosen = policy.choose(b.node.Cards, &pod.Demand, b.chosen)
	}
	return len(b.chosen) >= pod.Cards
}

// lost returns what the room is worth less if the pod is placed on the chosen cards.
func (b *before) lost(pod *Shape) (cost float64) {
	share := gpu.Share{Memory: pod.Memory, Cores: pod.Cores, Containers: pod.Containers}
	b.changed = b.changed[:0]
	for _, p := range b.chosen {
		c := changedCard{Card: b.node.Cards[p.position], position: p.position}
		c.before = float64(c.Free())
		c.Add(share)
		c.after = float64(c.Free())
		b.changed = append(b.changed, c)
	}
	left := Beside{CPU: b.node.CPU - pod.CPU, NodeMemory: b.node.NodeMemory - pod.NodeMemory}.amounts()
	for i := range b.rooms {
		r := &b.rooms[i]
		k, shares, memory := r.kind, r.shares, r.memory
		for j := range b.changed {
			c := &b.changed[j]
			if had := r.on[c.position]; had > 0 {
				has := k.sharesOf(&c.Card, c.after)
				shares += has - had
				memory -= c.before
				if has > 0 {
					memory += c.after
				}
			}
		}
		pods := 0.0
		if k.Cards == 1 {
			pods = k.atMost(shares, &left)
		} else {
			pods = b.onSeveral(r, shares, &left)
		}
		cost += r.worth - k.worth(pods, memory)
	}
	return cost + b.emptiness()
}

// emptiness returns what the node is worth less because it is less empty with the placement. If pods end, a node that few pods use becomes empty
// before long, and then has room for any kind. So pods go to nodes that are in use already, and the more so the more these are used.
func (b *before) emptiness() float64 {
	if b.perEmptiness == 0 || len(b.changed) == 0 {
		return 0
	}
	after := b.free
	for i := range b.changed {
		after -= b.changed[i].before - b.changed[i].after
	}
	return b.perEmptiness * (b.free*b.free - after*after) / b.all
}

// onSeveral returns how many pods of a kind with several cards the node has room for after the placement.
func (b *before) onSeveral(r *worthRoom, shares float64, left *amounts) float64 {
	var buffer [usualCards]float64
	on := append(buffer[:0], r.on...)
	for j := range b.changed {
		c := &b.changed[j]
		on[c.position] = r.kind.sharesOf(&c.Card, c.after)
	}
	return r.kind.podsOf(on, shares, left)
}

// worth returns what that much room for the kind is worth. Room counts by its part of all room for the kind, so what is scarce is worth more.
func (k *weighed) worth(pods, memory float64) float64 {
	if pods == 0 {
		return 0
	}
	return k.perPod*pods + k.perMemory*memory
}

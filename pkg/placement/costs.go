package placement

import (
	"github.com/gpushare/gpushare/pkg/gpu"
)

// Costs are what a pod of each kind costs on a node: what the node's room is worth less with the pod. The cost is NotFitting if too few cards have
// room for such a pod.
type Costs [MaxKinds]float64

// NotFitting is no cost.
const NotFitting = -1

// Costs returns the costs on the node.
func (o *Outlook) Costs(n *NodeRoom) *Costs {
	var space space
	var buffer [usualCards]pick
	costs, b := new(Costs), o.before(n, &space)
	for i := range o.kinds {
		costs[i] = NotFitting
		kind := &o.kinds[i].Shape
		if chosen := o.cardPolicy.choose(n.Cards, &kind.Demand, buffer[:0]); len(chosen) == kind.Cards {
			costs[i] = b.lost(kind, chosen)
		}
	}
	return costs
}

// CostOf returns what a pod of that kind costs on the node. It is faster than Costs for one kind. Of a pod that doesn't fit, so much counts as there
// is room for.
func (o *Outlook) CostOf(n *NodeRoom, kind int) float64 { return o.Cost(n, &o.kinds[kind].Shape) }

// Cost is CostOf for any shape. Of a pod that fits too few cards, the emptiest cards count.
func (o *Outlook) Cost(n *NodeRoom, pod *Shape) float64 {
	var space space
	b := o.before(n, &space)
	if pod.Cards == 0 {
		return b.lost(pod, nil)
	}
	var buffer [usualCards]pick
	chosen := o.cardPolicy.choose(n.Cards, &pod.Demand, buffer[:0])
	if len(chosen) < pod.Cards {
		chosen = Spread.choose(n.Cards, &gpu.Demand{Cards: pod.Cards, Memory: 1}, buffer[:0])
	}
	return b.lost(pod, chosen)
}

// before is a node before a placement, with what the costs of all placements have in common. Amounts are floating-point numbers, see whole.
type before struct {
	node *NodeRoom
	// perEmptiness is the sum over the kinds that could use the node once it is empty, free and all are what NodeRoom.memory returns.
	perEmptiness, free, all float64
	// rooms are what the node has for the kinds for which it has any.
	rooms []worthRoom
	// on is how many shares each card has free for each of the rooms; the rooms of one card follow each other.
	on []float64
}

// space is memory for before on the stack, which is enough for a usual node.
type space struct {
	rooms [MaxKinds]worthRoom
	on    [MaxKinds * usualCards]float64
}

// worthRoom is what a node has for a kind. It has all that lost reads in its innermost loop.
type worthRoom struct {
	room
	worth float64
	rates
	kind *weighed
	// simple is true if a pod of the kind asks for one card and no cores.
	simple bool
}

// changedCard is a card with a placement.
type changedCard struct {
	Card
	position int
	// before and after are what is free without and with it.
	before, after float64
}

func (o *Outlook) before(n *NodeRoom, s *space) before {
	b := before{node: n, rooms: s.rooms[:0], on: s.on[:]}
	b.free, b.all = n.memory()
	for i := range o.kinds {
		kind := &o.kinds[i]
		if kind.perEmptiness > 0 && n.usableOnceEmpty(i, kind) {
			b.perEmptiness += kind.perEmptiness
		}
		if r := n.roomFor(i, kind); r.pods > 0 {
			b.rooms = append(b.rooms, worthRoom{
				room: r, worth: kind.worth(r.pods, r.memory), rates: kind.rates, kind: kind, simple: kind.Cards == 1 && kind.Cores == 0,
			})
		}
	}
	if len(b.rooms)*len(n.Cards) > len(b.on) {
		b.on = make([]float64, len(b.rooms)*len(n.Cards))
	}
	for position := range n.Cards {
		card, on := &n.Cards[position], b.onCard(position)
		free := float64(card.Free())
		for i := range b.rooms {
			on[i] = b.rooms[i].kind.sharesOf(card, free)
		}
	}
	return b
}

// onCard returns how many shares the card at that position has free for each of the rooms.
func (b *before) onCard(position int) []float64 { return b.on[position*len(b.rooms):][:len(b.rooms)] }

// lost returns what the node is worth less if the pod is placed on the chosen cards.
func (b *before) lost(pod *Shape, chosen []pick) (cost float64) {
	if far(b.node.Cards, chosen, &pod.Demand) {
		cost = farCost
	}
	left := Beside{CPU: b.node.CPU - pod.CPU, NodeMemory: b.node.NodeMemory - pod.NodeMemory}.amounts()
	if len(chosen) == 1 && !b.node.Cards[chosen[0].position].limits() {
		return cost + b.lostOnCard(pod, chosen, &left)
	}
	var buffer [usualCards]changedCard
	changed := b.change(pod, chosen, buffer[:0])
	for i := range b.rooms {
		cost += b.lostOf(i, changed, &left)
	}
	return cost + b.emptiness(changed)
}

// lostOnCard is lost for the usual case: one card, of which only the memory limits what is placed there. It runs for each pair of kinds on a node, so
// it has the computations of lostOf inlined. left is what is free beside the cards after the placement.
func (b *before) lostOnCard(pod *Shape, chosen []pick, left *amounts) (cost float64) {
	var buffer [1]changedCard
	changed := b.change(pod, chosen, buffer[:0])
	c := &changed[0]
	on := b.onCard(c.position)
	for i := range b.rooms {
		r := &b.rooms[i]
		if !r.simple {
			cost += b.lostOf(i, changed, left)
			continue
		}
		shares, memory := r.shares, r.memory
		if had := on[i]; had > 0 {
			has := whole(c.after+0.5, r.shareRate)
			shares += has - had
			memory -= c.before
			if has > 0 {
				memory += c.after
			}
		}
		if enough := left.cpu * r.cpuRate; enough < shares { // The function min would be slower.
			shares = enough
		}
		if enough := left.nodeMemory * r.nodeMemoryRate; enough < shares {
			shares = enough
		}
		worth := 0.0
		if shares >= 1 {
			worth = r.perPod*whole(shares, 1) + r.perMemory*memory
		}
		cost += r.worth - worth
	}
	return cost + b.emptiness(changed)
}

// change appends the chosen cards with the pod to changed.
func (b *before) change(pod *Shape, chosen []pick, changed []changedCard) []changedCard {
	share := gpu.Share{Memory: pod.Memory, Cores: pod.Cores, Containers: pod.Containers}
	for _, p := range chosen {
		c := changedCard{Card: b.node.Cards[p.position], position: p.position}
		c.before = float64(c.Free())
		c.Add(share)
		c.after = float64(c.Free())
		changed = append(changed, c)
	}
	return changed
}

// lostOf returns what the room at that position is worth less. left is what is free beside the cards after the placement.
func (b *before) lostOf(i int, changed []changedCard, left *amounts) float64 {
	r := &b.rooms[i]
	k, shares, memory := r.kind, r.shares, r.memory
	for j := range changed {
		c := &changed[j]
		if had := b.onCard(c.position)[i]; had > 0 {
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
		pods = k.atMost(shares, left)
	} else {
		pods = b.onSeveral(i, shares, changed, left)
	}
	return r.worth - k.worth(pods, memory)
}

// farCost is the cost of cards that aren't near an adapter, for pods that prefer it: so little that it decides only between equal nodes.
const farCost = 1e-9

// emptiness returns what the node is worth less because it is less empty with the placement. If pods end, a node that few pods use becomes empty
// before long, and then has room for kinds with several cards. So pods go to nodes that are in use already, the more so the more these are used, and
// to nodes that are too small for these kinds.
func (b *before) emptiness(changed []changedCard) float64 {
	if b.perEmptiness == 0 || len(changed) == 0 {
		return 0
	}
	after := b.free
	for i := range changed {
		after -= changed[i].before - changed[i].after
	}
	return b.perEmptiness * (b.free*b.free - after*after) / b.all
}

// onSeveral returns how many pods the node has room for after the placement, of a kind with several cards.
func (b *before) onSeveral(i int, shares float64, changed []changedCard, left *amounts) float64 {
	var buffer [usualCards]float64
	on, kind := buffer[:0], b.rooms[i].kind
	for position := range b.node.Cards {
		on = append(on, b.onCard(position)[i])
	}
	for j := range changed {
		c := &changed[j]
		on[c.position] = kind.sharesOf(&c.Card, c.after)
	}
	return kind.podsOf(on, shares, left)
}

// worth returns what that much room for the kind is worth. Room counts by its part of all room for the kind, so what is scarce is worth more.
func (k *weighed) worth(pods, memory float64) float64 {
	if pods == 0 {
		return 0
	}
	return k.perPod*pods + k.perMemory*memory
}

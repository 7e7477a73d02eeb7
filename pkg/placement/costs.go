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
	var single [MaxKinds]podOnCard
	costs, b, pods := new(Costs), o.before(n, &space), single[:0]
	for i := range o.kinds {
		costs[i] = NotFitting
		kind := &o.kinds[i].Shape
		switch chosen := o.cardPolicy.choose(n.Cards, &kind.Demand, buffer[:0]); {
		case len(chosen) != kind.Cards:
		case b.isSingle(chosen):
			pods = append(pods, b.onCard(i, kind, chosen))
		default:
			costs[i] = b.lost(kind, chosen)
		}
	}
	b.lostOnCards(pods)
	for i := range pods {
		costs[pods[i].kind] = pods[i].cost
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
	// on is how many shares each card has free for each of the rooms; the numbers of one room follow each other.
	on []float64
}

// space is memory for before on the stack, which is enough for a usual node.
type space struct {
	rooms [MaxKinds]worthRoom
	on    [MaxKinds * usualCards]float64
}

// worthRoom is what a node has for a kind. It has all that lost reads in its innermost loop.
type worthRoom struct {
	kindRoom
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
	b := before{node: n, rooms: s.rooms[:0], on: s.on[:0]}
	b.free, b.all = n.memory()
	for i := range o.kinds {
		kind := &o.kinds[i]
		if kind.perEmptiness > 0 && n.usableOnceEmpty(i, kind) {
			b.perEmptiness += kind.perEmptiness
		}
		var r kindRoom
		r, b.on = n.roomFor(i, kind, b.on)
		if r.pods > 0 {
			b.rooms = append(b.rooms, worthRoom{
				kindRoom: r, worth: kind.worth(r.pods, r.memory), rates: kind.rates, kind: kind, simple: kind.Cards == 1 && kind.Cores == 0,
			})
		}
	}
	return b
}

// sharesOf returns how many shares each card has free for the room at that position.
func (b *before) sharesOf(i int) []float64 {
	return b.on[i*len(b.node.Cards):][:len(b.node.Cards)]
}

// lost returns what the node is worth less if the pod is placed on the chosen cards.
func (b *before) lost(pod *Shape, chosen []pick) float64 {
	if b.isSingle(chosen) {
		pods := [1]podOnCard{b.onCard(0, pod, chosen)}
		b.lostOnCards(pods[:])
		return pods[0].cost
	}
	var buffer [usualCards]changedCard
	cost, left, changed := b.farCost(pod, chosen), b.left(pod), b.change(pod, chosen, buffer[:0])
	for i := range b.rooms {
		cost += b.lostOf(i, changed, &left)
	}
	taken := 0.0
	for i := range changed {
		taken += changed[i].before - changed[i].after
	}
	return cost + b.emptiness(taken)
}

// farCost is the cost of cards that aren't near an adapter, for pods that prefer it: so little that it decides only between equal nodes.
func (b *before) farCost(pod *Shape, chosen []pick) float64 {
	if far(b.node.Cards, chosen, &pod.Demand) {
		return 1e-9
	}
	return 0
}

// left returns what is free beside the cards after the placement.
func (b *before) left(pod *Shape) amounts {
	return Beside{CPU: b.node.CPU - pod.CPU, NodeMemory: b.node.NodeMemory - pod.NodeMemory}.amounts()
}

// podOnCard is a pod on one card, of which only the memory limits what is placed there: the usual case.
type podOnCard struct {
	*Shape
	// left is what is free beside the cards after the placement.
	left amounts
	// before and after are what is free on the card without and with the pod.
	before, after float64
	cost          float64
	// kind is the pod's position in the outlook.
	kind int
	// chosen is the card.
	chosen [1]pick
}

// isSingle reports whether the chosen cards are one card, of which only the memory limits what is placed there.
func (b *before) isSingle(chosen []pick) bool {
	return len(chosen) == 1 && !b.node.Cards[chosen[0].position].limits()
}

func (b *before) onCard(kind int, pod *Shape, chosen []pick) podOnCard {
	p := podOnCard{Shape: pod, kind: kind, left: b.left(pod), cost: b.farCost(pod, chosen), chosen: [1]pick{chosen[0]}}
	free := b.node.Cards[chosen[0].position].Free()
	p.before, p.after = float64(free), float64(free.Sub(pod.Memory))
	return p
}

// lostOnCards adds to the cost of each pod what the node is worth less with it. It runs for each pair of kinds on a node, so it has the
// computations of lostOf inlined, and what it needs of a room is read once for all pods.
func (b *before) lostOnCards(pods []podOnCard) {
	for i := range b.rooms {
		r := &b.rooms[i]
		if !r.simple {
			for j := range pods {
				p := &pods[j]
				var buffer [1]changedCard
				p.cost += b.lostOf(i, b.change(p.Shape, p.chosen[:], buffer[:0]), &p.left)
			}
			continue
		}
		all, memoryOfAll, rates, worth, on := r.shares, r.memory, r.rates, r.worth, b.sharesOf(i)
		for j := range pods {
			p := &pods[j]
			shares, memory, had := all, memoryOfAll, on[p.chosen[0].position]
			if had > 0 {
				has := whole(p.after+0.5, rates.shareRate)
				shares += has - had
				memory -= p.before
				if has > 0 {
					memory += p.after
				}
			}
			cpu, nodeMemory := p.left.cpu*rates.cpuRate, p.left.nodeMemory*rates.nodeMemoryRate
			if had == 0 && cpu >= shares && nodeMemory >= shares {
				continue // Nothing is lost.
			}
			if cpu < shares { // The function min would be slower.
				shares = cpu
			}
			if nodeMemory < shares {
				shares = nodeMemory
			}
			rest := 0.0
			if shares >= 1 {
				rest = rates.perPod*whole(shares, 1) + rates.perMemory*memory
			}
			p.cost += worth - rest
		}
	}
	for j := range pods {
		pods[j].cost += b.emptiness(pods[j].before - pods[j].after)
	}
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
		if had := b.sharesOf(i)[c.position]; had > 0 {
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

// emptiness returns what the node is worth less because it is less empty with a placement that takes so much memory. If pods end, a node that few
// pods use becomes empty before long, and then has room for kinds with several cards. So pods go to nodes that are in use already, the more so
// the more these are used, and to nodes that are too small for these kinds.
func (b *before) emptiness(taken float64) float64 {
	if b.perEmptiness == 0 || taken == 0 {
		return 0
	}
	after := b.free - taken
	return b.perEmptiness * (b.free*b.free - after*after) / b.all
}

// onSeveral returns how many pods the node has room for after the placement, of a kind with several cards.
func (b *before) onSeveral(i int, shares float64, changed []changedCard, left *amounts) float64 {
	var buffer [usualCards]float64
	on, kind := append(buffer[:0], b.sharesOf(i)...), b.rooms[i].kind
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

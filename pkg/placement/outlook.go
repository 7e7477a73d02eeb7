package placement

import (
	"math"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// MaxKinds is the largest number of kinds of an Outlook.
const MaxKinds = 64

// Outlook is what is expected of a cluster: which kinds of pods come, how often, and how much room all nodes have for each kind. By it, Costs
// tells what a placement takes from the pods that are expected. An Outlook is never changed, so it can be made and used without a lock.
type Outlook struct {
	// cardPolicy chooses the cards of a node.
	cardPolicy Policy
	kinds      []weighed
	// positions are the positions of the kinds, by shape.
	positions map[Shape]int
}

// weighed is a kind with what room for it is worth.
type weighed struct {
	Shape
	// perPod is what room for one such pod is worth, perMemory what a unit of free memory is worth that such pods can use.
	perPod, perMemory float64
}

const (
	// weightExponent makes small and frequent kinds weigh less than in proportion. It was found by replays of a public trace (test/packing).
	weightExponent = 0.6
	// ample is how many pods of a kind the cluster has room for if more room is worth half of what the first is worth.
	ample = 10
)

// NewOutlook returns the outlook for the first MaxKinds of the kinds, and for the nodes. Their Excluded are bits for these kinds. Without kinds, it
// expects generic ones.
func NewOutlook(kinds []Kind, cardPolicy Policy, nodes []NodeRoom) *Outlook {
	card := meanCard(nodes)
	if len(kinds) == 0 {
		kinds = genericKinds(card)
	}
	kinds = kinds[:min(len(kinds), MaxKinds)]
	o := &Outlook{cardPolicy: cardPolicy, kinds: make([]weighed, len(kinds)), positions: map[Shape]int{}}
	weights, sum := make([]float64, len(kinds)), 0.0
	for i := range kinds {
		weights[i] = math.Pow(kinds[i].Frequency/kinds[i].size(card), weightExponent)
		sum += weights[i]
	}
	for i := range kinds {
		shape := kinds[i].Shape
		pods, memory := 0.0, 0.0
		for j := range nodes {
			if r := nodes[j].roomFor(i, &shape); r.pods > 0 {
				pods, memory = pods+float64(r.pods), memory+float64(r.memory)
			}
		}
		o.kinds[i] = weighed{
			Shape:     shape,
			perPod:    weights[i] / sum / (pods + ample),
			perMemory: weights[i] / sum / (memory + ample*shape.size(card)),
		}
		o.positions[shape] = i
	}
	return o
}

// meanCard returns the mean memory of the nodes' cards, at least 1.
func meanCard(nodes []NodeRoom) float64 {
	memory, cards := 0.0, 0.0
	for i := range nodes {
		for j := range nodes[i].Cards {
			memory, cards = memory+float64(nodes[i].Cards[j].Memory), cards+1
		}
	}
	return max(memory/max(cards, 1), 1)
}

// KindOf returns the position of the kind that is the most similar to the shape, and whether it has exactly this shape.
func (o *Outlook) KindOf(shape *Shape) (position int, exact bool) {
	position, exact = o.positions[*shape]
	if exact {
		return position, true
	}
	least := math.Inf(1)
	for i := range o.kinds {
		if distance := shape.distance(&o.kinds[i].Shape); distance < least {
			position, least = i, distance
		}
	}
	return position, false
}

// worth returns what room for the kind is worth. Room counts by its part of all room for the kind, so what is scarce is worth more.
func (k *weighed) worth(r room) float64 {
	if r.pods == 0 {
		return 0
	}
	return k.perPod*float64(r.pods) + k.perMemory*float64(r.memory)
}

// Costs are what a pod of each kind costs on a node: what the node's room is worth less with the pod. The cost is notFitting if too few cards have
// room for such a pod.
type Costs [MaxKinds]float64

const notFitting = -1

// Costs returns the costs on the node.
func (o *Outlook) Costs(n *NodeRoom) *Costs {
	costs, before := new(Costs), o.before(n)
	for i := range o.kinds {
		if kind := &o.kinds[i].Shape; n.fits(kind) {
			costs[i] = before.cost(kind)
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

// Cost is CostOf for any shape.
func (o *Outlook) Cost(n *NodeRoom, pod *Shape) float64 { return o.before(n).cost(pod) }

// before is a node before a placement.
type before struct {
	*Outlook
	node *NodeRoom
	// rooms are what the node has for each kind.
	rooms [MaxKinds]room
	// after is the memory for the cards after a placement.
	after []Card
}

func (o *Outlook) before(n *NodeRoom) *before {
	b := &before{Outlook: o, node: n, after: make([]Card, 0, len(n.Cards))}
	for i := range o.kinds {
		b.rooms[i] = n.roomFor(i, &o.kinds[i].Shape)
	}
	return b
}

// cost returns what the pod costs on the node.
func (b *before) cost(pod *Shape) (cost float64) {
	var buffer [usualCards]int
	after, changed := b.node.with(pod, &b.cardPolicy, b.after, buffer[:0])
	for i := range b.kinds {
		if b.rooms[i].pods == 0 {
			continue
		}
		k, r := &b.kinds[i], b.rooms[i]
		for _, position := range changed {
			r.replace(&b.node.Cards[position], &after.Cards[position], &k.Demand)
		}
		if r.pods = after.podsOf(&k.Shape, r.shares); r != b.rooms[i] {
			cost += k.worth(b.rooms[i]) - k.worth(r)
		}
	}
	return cost
}

// replace counts what a card has for the kind instead of what it had before.
func (r *room) replace(before, card *Card, demand *gpu.Demand) {
	shares := before.shares(demand)
	if shares == 0 {
		return
	}
	r.shares -= shares
	r.memory -= before.Free()
	if left := card.shares(demand); left > 0 {
		r.shares += left
		r.memory += card.Free()
	}
}

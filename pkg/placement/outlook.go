package placement

import (
	"math"
	"slices"
)

// MaxKinds is the largest number of kinds of an Outlook.
const MaxKinds = 64

// Outlook is what is expected of a cluster: which kinds of pods come, how often, and how much room all nodes have for each kind. By it, Costs
// tells what a placement takes from the pods that are expected. An Outlook is never changed, so it can be made and used without a lock.
type Outlook struct {
	// cardPolicy chooses the cards of a node.
	cardPolicy Policy
	kinds      []weighedKind
	// positions are the positions of the kinds, by shape.
	positions map[Shape]int
}

// weighedKind is a kind with what room for it is worth.
type weighedKind struct {
	Shape
	// perPod is what room for one such pod is worth, perMemory what a unit of free memory is worth that such pods can use.
	perPod, perMemory float64
	// perEmptiness is what the square of the free part of a node's memory is worth, for each unit of this memory, if the kind could use the node
	// once it is empty. What such nodes are worth counts by its part of all of them, as room does: where all of them are nearly full, the emptiest
	// become empty for kinds that no other node can hold.
	perEmptiness float64
	// shareRate, cpuRate and nodeMemoryRate are the reciprocals of what such a pod needs, see whole.
	shareRate, cpuRate, nodeMemoryRate float64
}

const (
	// weightExponent makes small and frequent kinds weigh less than in proportion. It was found by replays of a public trace (test/packing).
	weightExponent = 0.6
	// ample is how many pods of a kind the cluster has room for if more room is worth half of what the first is worth. With a larger one, nodes that
	// are empty are not kept for kinds with many cards, as replays of the trace with pods that end showed.
	ample = 1
	// emptinessWeight is how much emptiness counts, compared with room, if as many pods end as come.
	emptinessWeight = 3
	// horizon is how many of the pods that come next count beside those that wait, where it is about nodes that become empty. With a larger one, large
	// pods wait longer when the kinds of pods change.
	horizon = 60
)

// NewOutlook returns the outlook for the first MaxKinds of the kinds, of which there must be one, and for the nodes. Their Excluded are bits for
// these kinds. turnover is how many pods end for each one that comes, 0 to 1.
func NewOutlook(kinds []Kind, turnover float64, cardPolicy Policy, nodes []NodeRoom) *Outlook {
	kinds = kinds[:min(len(kinds), MaxKinds)]
	o := &Outlook{cardPolicy: cardPolicy, kinds: make([]weighedKind, len(kinds)), positions: map[Shape]int{}}
	card, emptiness, repeats := meanCard(nodes), make([]float64, len(nodes)), make([]bool, len(nodes))
	for i := range nodes {
		free, all := nodes[i].memory()
		emptiness[i] = free * free / max(all, 1)
		repeats[i] = i > 0 && nodes[i].Equal(&nodes[i-1])
	}
	weights, frequencies, asked := 0.0, 0.0, 0.0
	for i := range kinds {
		weights += kinds[i].weight(card)
		frequencies += kinds[i].Frequency
	}
	for i := range kinds {
		kind, k := &kinds[i], newWeighedKind(kinds[i].Shape)
		size, weight := kind.size(card), kind.weight(card)/weights
		pods, memory, empty, usable := k.roomOn(nodes, i, emptiness, repeats)
		k.perPod = weight / (pods + ample)
		k.perMemory = weight / (memory + ample*size)
		if usable { // Pods that no node can hold count for nothing, however many wait.
			asks := (horizon*kind.Frequency/frequencies + float64(kind.Waiting)) * size
			asked += asks
			k.perEmptiness = emptinessWeight * turnover * asks / empty
		}
		o.kinds[i], o.positions[k.Shape] = k, i
	}
	for i := range o.kinds {
		if k := &o.kinds[i]; k.perEmptiness > 0 {
			k.perEmptiness /= asked
		}
	}
	return o
}

// newWeighedKind returns the kind without weights. A pod that asks for no memory of cards is counted as if it asked for one unit.
func newWeighedKind(shape Shape) weighedKind {
	return weighedKind{
		Shape: shape, shareRate: 1 / float64(max(shape.Memory, 1)), cpuRate: 1 / float64(shape.CPU), nodeMemoryRate: 1 / float64(shape.NodeMemory),
	}
}

// weight returns how much room for the kind counts, compared with other kinds.
func (k *Kind) weight(card float64) float64 {
	return math.Pow(k.Frequency/k.size(card), weightExponent)
}

// roomOn returns for how many pods of the kind the nodes have room, and the memory that these can use. empty is the emptiness of the nodes that the kind
// could use once they are empty, and one more; usable is false if there are none. The kind is at that position in the outlook. repeats tells which nodes
// are equal to the ones before them.
func (k *weighedKind) roomOn(nodes []NodeRoom, position int, emptiness []float64, repeats []bool) (pods, memory, empty float64, usable bool) {
	var on []float64
	var room kindRoom
	onceEmpty := false
	empty = 1
	for i := range nodes {
		if n := &nodes[i]; !repeats[i] {
			on = slices.Grow(on[:0], len(n.Cards))[:len(n.Cards)]
			room, onceEmpty = n.roomFor(position, k, on), n.usableOnceEmpty(position, k)
		}
		if room.pods > 0 {
			pods, memory = pods+room.pods, memory+room.memory
		}
		if onceEmpty {
			empty, usable = empty+emptiness[i], true
		}
	}
	return pods, memory, empty, usable
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

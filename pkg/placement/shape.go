package placement

import (
	"cmp"
	"math"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Shape is what a pod asks for of its node.
type Shape struct {
	gpu.Demand
	NodeResources
	// Constraints are equal for pods that can use the same nodes, whatever these have free.
	Constraints unique.Handle[string]
}

// NodeResources is an amount of what nodes have beside cards: CPU in thousandths, memory in bytes.
type NodeResources struct{ CPU, NodeMemory int64 }

// Kind is a shape, how often pods of this shape come, compared with other kinds, and how many wait because they found no room.
type Kind struct {
	Shape
	Frequency float64
	Waiting   int
}

// Compare orders shapes, so that equal sets of them have one order.
func (s *Shape) Compare(o *Shape) int {
	return cmp.Or(
		cmp.Compare(s.Cards, o.Cards), cmp.Compare(s.Memory, o.Memory), cmp.Compare(s.Cores, o.Cores), cmp.Compare(s.Containers, o.Containers),
		cmp.Compare(s.RDMA, o.RDMA),
		cmp.Compare(s.CPU, o.CPU), cmp.Compare(s.NodeMemory, o.NodeMemory), cmp.Compare(text(s.Constraints), text(o.Constraints)),
	)
}

func text(handle unique.Handle[string]) string {
	if handle == (unique.Handle[string]{}) {
		return ""
	}
	return handle.Value()
}

// size returns the memory of cards that such a pod takes from others, at least 1. Computing counts as that part of a card with this memory.
func (s *Shape) size(card float64) float64 {
	each := max(float64(s.Memory), float64(s.Cores)/float64(gpu.CardCores)*card, 1)
	return each * float64(s.Cards)
}

// distance returns how much two shapes differ: the sum of the logarithms of the ratios of their amounts, and more if they ask for another number
// of cards, or can use other nodes.
func (s *Shape) distance(o *Shape) float64 {
	const otherCards, otherNodes, nodeMemory = 10, 0.5, 0.1 // Memory of nodes is seldom scarce.
	ratio := func(a, b, least float64) float64 { return math.Abs(math.Log(max(a, least) / max(b, least))) }
	sum := ratio(float64(s.Memory), float64(o.Memory), 1) + ratio(float64(s.Cores), float64(o.Cores), 1)
	sum += ratio(float64(s.CPU), float64(o.CPU), 1000) + nodeMemory*ratio(float64(s.NodeMemory), float64(o.NodeMemory), 1<<30)
	if s.Cards != o.Cards {
		sum += otherCards * ratio(float64(s.Cards), float64(o.Cards), 1)
	}
	if s.Constraints != o.Constraints {
		sum += otherNodes
	}
	return sum
}

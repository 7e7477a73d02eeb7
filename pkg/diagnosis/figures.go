package diagnosis

import (
	"cmp"
	"math"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// nodeFigures are the nodes, sorted by name, with their figures in the same order.
type nodeFigures struct {
	*eligibility.Index
	nodes   []Node
	figures []figures
}

func newNodeFigures(nodes []Node) nodeFigures {
	x := nodeFigures{nodes: nodes, figures: make([]figures, len(nodes))}
	eligible := make([]*eligibility.Node, len(nodes))
	for i := range nodes {
		eligible[i], x.figures[i] = &nodes[i].Node, newFigures(&nodes[i])
	}
	x.Index = eligibility.NewIndex(eligible)
	return x
}

// figures are what the search for room reads of a node for each request. They are computed once.
type figures struct {
	totals placement.Totals
	// piece, free and largest are MostFree, FreeHealthy and Largest of the totals in bytes, to compare nodes with different units.
	piece, free, largest uint64
	// spare is what kube-scheduler counts as free on the node; the greatest amount if the node doesn't report its allocatable memory.
	spare gpu.Memory
	// after are the cards once the terminating pods have ended; nil if no pod is terminating.
	after *cardsAfter
	// plain is true if nothing but the totals decides what the node has for a pod that asks for memory of one card only.
	plain bool
}

type cardsAfter struct {
	cards  []placement.Card
	totals placement.Totals
}

func newFigures(n *Node) figures {
	totals := placement.Sum(n.Cards)
	f := figures{
		totals: totals, piece: n.Unit.Bytes(totals.MostFree), free: n.Unit.Bytes(totals.FreeHealthy), largest: n.Unit.Bytes(totals.Largest),
		spare: math.MaxInt64,
	}
	if allocatable, known := n.allocatable(); known {
		f.spare = allocatable.Sub(n.Requested)
	}
	if len(n.Terminating) > 0 {
		cards := n.Cards
		for i := range n.Terminating {
			cards = withUsed(cards, n.Terminating[i].Placement, (*placement.Card).Subtract)
		}
		f.after = &cardsAfter{cards, placement.Sum(cards)}
	}
	f.plain = f.after == nil && len(n.Nominees) == 0 && f.spare >= totals.FreeHealthy && !totals.Limited
	return f
}

// same reports whether two nodes have the same for each pod that asks for memory of one card only.
func (f *figures) same(o *figures) bool {
	return f.plain && o.plain && f.totals == o.totals && f.compare(o) == 0 && f.largest == o.largest
}

// compare compares what two nodes have free: first the largest piece, then the sum.
func (f *figures) compare(o *figures) int {
	return cmp.Or(cmp.Compare(f.piece, o.piece), cmp.Compare(f.free, o.free))
}

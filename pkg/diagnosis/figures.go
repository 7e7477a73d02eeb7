package diagnosis

import (
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
	// spare is what kube-scheduler counts as free on the node; the greatest amount if the node doesn't report its allocatable memory.
	spare gpu.Memory
	// after are the cards once the terminating pods have ended; nil if no pod is terminating.
	after []placement.Card
}

func newFigures(n *Node) figures {
	f := figures{totals: placement.Sum(n.Cards), spare: math.MaxInt64}
	if allocatable, known := n.allocatable(); known {
		f.spare = allocatable.Sub(n.Requested)
	}
	if len(n.Terminating) > 0 {
		cards := n.Cards
		for i := range n.Terminating {
			cards = withUsed(cards, n.Terminating[i].Placement, (*placement.Card).Subtract)
		}
		f.after = cards
	}
	return f
}

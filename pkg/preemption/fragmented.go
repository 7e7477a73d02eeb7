package preemption

import "github.com/gpushare/gpushare/pkg/placement"

// Fragmented reports whether only fragmentation keeps the request off the node: the node's free resources cover the
// request, and too few cards have room, although they would be large enough.
func Fragmented(node Node, request Request) bool {
	return node.Free.cover(request.Resources) && placement.Fit(node.Cards, request.Demand).Resolvable()
}

// Candidate is a node with the victims that free some of its cards.
type Candidate struct {
	// Node is the node's position in the list of nodes, Cards the indexes of the cards.
	Node  int
	Cards []int
	Victims
}

// ChooseNode returns the cheapest victims over all nodes, by the order of Choose; among equal ones, those of the first
// node. No pod may be marked as proposed. ChooseNode returns false if not enough cards can be freed.
func ChooseNode(nodes []Node, request Request) (Candidate, bool) {
	var best *plan
	at := 0
	for i, node := range nodes {
		p := node.cheapest(request)
		if p != nil && len(p.pods) > 0 && (best == nil || p.compareCost(best) < 0) {
			best, at = p, i
		}
	}
	if best == nil {
		return Candidate{}, false
	}
	return Candidate{Node: at, Cards: best.cards, Victims: best.victims()}, true
}

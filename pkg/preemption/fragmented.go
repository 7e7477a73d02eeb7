package preemption

import "github.com/gpushare/gpushare/pkg/placement"

// Fragmented says whether nothing but the way in which GPU memory is spread over the cards keeps the request off the node:
// what the node has left in all covers everything that is asked for, and no card has room.
func Fragmented(node Node, request Request) bool {
	return node.Free.cover(request.Others, nil) && placement.Fit(node.Cards, request.Memory).Resolvable()
}

// Clearing is who must leave which of several nodes to free a card.
type Clearing struct {
	// Node is a position in the list of nodes, Card the index of its card.
	Node, Card int
	Victims
}

// ChooseNode returns the cheapest way to free a card on one of the nodes, by the order of Choose; of equal ones the first
// node's. Nobody is to be proposed. false says that no card can be freed anywhere.
func ChooseNode(nodes []Node, request Request) (Clearing, bool) {
	var best *plan
	at := 0
	for i, node := range nodes {
		p := node.cheapest(request)
		if p != nil && len(p.pods) > 0 && (best == nil || p.cost(best) < 0) {
			best, at = p, i
		}
	}
	if best == nil {
		return Clearing{}, false
	}
	return Clearing{Node: at, Card: best.card, Victims: best.victims()}, true
}

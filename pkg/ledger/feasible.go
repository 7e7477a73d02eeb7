package ledger

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// FitsEmpty reports whether the pod would fit a card of one of the nodes if the node had no pods.
func (l *Ledger) FitsEmpty(pod gpu.Pod, names []string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.ContainsFunc(names, func(name string) bool {
		n := l.nodes[name]
		return n != nil && n.shareable() == placement.Fits && placement.Fit(n.emptyCards(), pod.Demand()) == placement.Fits
	})
}

// emptyCards returns the node's cards without allocations.
func (n *node) emptyCards() []placement.Card {
	cards := make([]placement.Card, len(n.inventory))
	for i, c := range n.inventory {
		cards[i] = placement.NewCard(c, 0)
	}
	return cards
}

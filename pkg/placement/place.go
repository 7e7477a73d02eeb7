package placement

import "github.com/gpushare/gpushare/pkg/gpu"

// Card is what of a card matters for placing: how much of it is taken, and whether it may be used. It is small on purpose:
// thousands are looked at for every pod.
type Card struct {
	Index        int
	Memory, Used gpu.Memory
	Unhealthy    bool
}

// NewCard returns the card with so much of it taken.
func NewCard(card gpu.Card, used gpu.Memory) Card {
	return Card{Index: card.Index, Memory: card.Memory, Used: used, Unhealthy: !card.Healthy()}
}

// Free is what can still be promised, zero for a card that holds more than it has.
func (c Card) Free() gpu.Memory { return c.Memory.Sub(c.Used) }

// Place chooses the card that the policy likes best among those that have room for request; ties go to the lower
// index. A request must be positive: a pod that asks nothing has no business here.
func Place(policy Policy, cards []Card, request gpu.Memory) (gpu.Placement, Reason) {
	totals := Sum(cards)
	if reason := totals.Fit(request); reason != Fits {
		return nil, reason
	}
	return gpu.On(cards[totals.choose(policy, cards, request).at].Index, request), Fits
}

// Fit is Place without the placement: it allocates nothing, which matters at thousands of nodes a pod.
func Fit(cards []Card, request gpu.Memory) Reason {
	totals := Sum(cards)
	return totals.Fit(request)
}

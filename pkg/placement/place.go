package placement

import "github.com/gpushare/gpushare/pkg/gpu"

// Card holds the fields of a card that a placement depends on. It is small because thousands are read for every pod.
type Card struct {
	Index        int
	Memory, Used gpu.Memory
	Unhealthy    bool
}

// NewCard returns the card with the given used memory.
func NewCard(card gpu.Card, used gpu.Memory) Card {
	return Card{Index: card.Index, Memory: card.Memory, Used: used, Unhealthy: !card.Healthy()}
}

// Free returns the memory that can still be allocated; zero if more is allocated than the card has.
func (c Card) Free() gpu.Memory { return c.Memory.Sub(c.Used) }

// Place returns the card that the policy prefers among those with room for the request, which must be positive.
func Place(policy Policy, cards []Card, request gpu.Memory) (gpu.Placement, Reason) {
	totals := Sum(cards)
	if reason := totals.Fit(request); reason != Fits {
		return nil, reason
	}
	return gpu.On(policy.choose(cards, request).Index, request), Fits
}

// choose returns the card that the policy prefers among those with room for the request. At least one must have room.
func (p Policy) choose(cards []Card, request gpu.Memory) (best *Card) {
	for i := range cards {
		c := &cards[i]
		switch {
		case c.Unhealthy || c.Free() < request:
		case best == nil || p.better(c, best) || c.Index < best.Index && !p.better(best, c):
			best = c
		}
	}
	return best
}

// Fit returns the reason that Place returns, without allocating memory: it runs for thousands of nodes per pod.
func Fit(cards []Card, request gpu.Memory) Reason {
	totals := Sum(cards)
	return totals.Fit(request)
}

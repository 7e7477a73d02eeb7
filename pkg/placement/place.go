package placement

import "github.com/gpushare/gpushare/pkg/gpu"

// Card is a card with what is taken of it.
type Card struct {
	gpu.Card
	Used gpu.Memory
}

// Free is what can still be promised, zero for a card that holds more than it has.
func (c Card) Free() gpu.Memory { return c.Memory.Sub(c.Used) }

// Place chooses the card that the policy likes best among those that have room for request; ties go to the lower
// index. A request must be positive: a pod that asks nothing has no business here.
func Place(policy Policy, cards []Card, request gpu.Memory) (gpu.Placement, Reason) {
	best, reason := choose(policy, cards, request)
	if reason != Fits {
		return nil, reason
	}
	return gpu.On(cards[best].Index, request), Fits
}

// Fit is Place without the placement: it allocates nothing, which matters at thousands of nodes a pod.
func Fit(cards []Card, request gpu.Memory) Reason {
	_, reason := choose(Binpack, cards, request)
	return reason
}

// choose returns the position of the best card, and Fits; or the reason why there is none.
func choose(policy Policy, cards []Card, request gpu.Memory) (int, Reason) {
	if len(cards) == 0 {
		return 0, NotShared
	}
	// Of the cards' reasons the mildest is the node's: what it takes to find room there.
	best, bestFree, reason := -1, gpu.Memory(0), TooLarge
	for i := range cards {
		c := &cards[i]
		free := c.Free()
		switch {
		case c.Memory < request:
			// Too small even when empty.
		case !c.Healthy():
			reason = min(reason, Unhealthy)
		case free < request:
			reason = min(reason, Full)
		case best < 0 || policy.better(free, bestFree) || free == bestFree && c.Index < cards[best].Index:
			best, bestFree = i, free
		}
	}
	if best < 0 {
		return 0, reason
	}
	return best, Fits
}

// Scattered says whether the cards that can be used have as much free as is asked for, taken together. Where Fit says
// Full all the same, fragmentation is to blame: no piece is large enough.
func Scattered(cards []Card, request gpu.Memory) bool {
	var free gpu.Memory
	for i := range cards {
		if cards[i].Healthy() {
			free = free.Add(cards[i].Free())
		}
	}
	return free >= request
}

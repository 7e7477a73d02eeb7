package placement

import "github.com/gpushare/gpushare/pkg/gpu"

// Totals are sums over a node's cards. They show whether a request fits without reading each card, which matters with
// thousands of nodes per pod. The owner must recompute them by Sum when a card changes.
type Totals struct {
	// Memory and Free are the sums over all cards.
	Memory, Free gpu.Memory
	// FreeHealthy is what the healthy cards have free together.
	FreeHealthy gpu.Memory
	// Largest is the memory of the largest card, and LargestHealthy that of the largest healthy one.
	Largest, LargestHealthy gpu.Memory
	// roomiest and tightest are the healthy cards with the most and the least free memory; ties go to the lowest index.
	roomiest, tightest spot
}

// spot is a chosen card.
type spot struct {
	// at is its position in the slice of cards.
	at           int
	memory, free gpu.Memory
}

// Sum returns the totals of the cards.
func Sum(cards []Card) Totals {
	var t Totals
	for i := range cards {
		c := &cards[i]
		free := c.Free()
		t.Memory, t.Free = t.Memory.Add(c.Memory), t.Free.Add(free)
		t.Largest = max(t.Largest, c.Memory)
		if c.Unhealthy {
			continue
		}
		t.FreeHealthy = t.FreeHealthy.Add(free)
		first, this := t.LargestHealthy == 0, spot{i, c.Memory, free}
		if first || free > t.roomiest.free || free == t.roomiest.free && c.Index < cards[t.roomiest.at].Index {
			t.roomiest = this
		}
		if first || free < t.tightest.free || free == t.tightest.free && c.Index < cards[t.tightest.at].Index {
			t.tightest = this
		}
		t.LargestHealthy = max(t.LargestHealthy, c.Memory)
	}
	return t
}

// Fit returns Fits if a card has room for the request, else the least severe reason among the cards. The request must be
// positive.
func (t *Totals) Fit(request gpu.Memory) Reason {
	switch {
	case t.Largest == 0:
		return NotShared
	case request <= t.roomiest.free:
		return Fits
	case request <= t.LargestHealthy && request <= t.FreeHealthy:
		return Fragmented
	case request <= t.LargestHealthy:
		return Full
	case request <= t.Largest:
		return Unhealthy
	}
	return TooLarge
}

// choose returns the card that the policy prefers for the request, which must fit a card.
func (t *Totals) choose(policy Policy, cards []Card, request gpu.Memory) spot {
	// Mostly one of the two known cards is the answer, without a loop over the cards.
	if !policy.better(t.tightest.free, t.roomiest.free) {
		return t.roomiest
	}
	if request <= t.tightest.free {
		return t.tightest
	}
	best := spot{at: -1}
	for i := range cards {
		c := &cards[i]
		free := c.Free()
		switch {
		case free < request || c.Unhealthy:
		case best.at < 0 || policy.better(free, best.free) || free == best.free && c.Index < cards[best.at].Index:
			best = spot{i, c.Memory, free}
		}
	}
	return best
}

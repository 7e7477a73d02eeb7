package placement

import "github.com/gpushare/gpushare/pkg/gpu"

// Totals is what a node's cards come to together. It says whether a request fits without a look at each card, which
// matters at thousands of nodes a pod: whoever keeps it has to sum anew when a card changes.
type Totals struct {
	// Memory and Free are the sums over all cards.
	Memory, Free gpu.Memory
	// FreeHealthy is what the healthy cards have free together.
	FreeHealthy gpu.Memory
	// Largest is the memory of the largest card, and LargestHealthy that of the largest healthy one.
	Largest, LargestHealthy gpu.Memory
	// roomiest and tightest are the healthy cards with the most and the least free; of several the one of the lowest index.
	roomiest, tightest spot
}

// spot is a card that was chosen among others.
type spot struct {
	// at is its position.
	at           int
	memory, free gpu.Memory
}

// Sum adds the cards up.
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

// Fit says whether a card has room for the request, or why none has: of the cards' reasons the mildest, for that is what
// it takes to find room there. The request must be positive.
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

// choose returns the card that the policy likes best for the request. There must be one that has room.
func (t *Totals) choose(policy Policy, cards []Card, request gpu.Memory) spot {
	// Mostly it is one of the two that are known, and none has to be looked at.
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

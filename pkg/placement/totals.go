package placement

import "github.com/gpushare/gpushare/pkg/gpu"

// Totals is what a node's cards come to together. It says whether a request fits without a look at each card, which
// matters at thousands of nodes a pod: whoever keeps it has to sum anew when a card changes.
type Totals struct {
	// Memory and Free are the sums over all cards.
	Memory, Free gpu.Memory
	// Roomiest and Tightest are the most and the least that a healthy card has free; at those positions; of several
	// the one of the lowest index.
	Roomiest, Tightest     gpu.Memory
	roomiestAt, tightestAt int
	// Largest is the memory of the largest card, and LargestHealthy that of the largest healthy one.
	Largest, LargestHealthy gpu.Memory
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
		first := t.LargestHealthy == 0
		if first || free > t.Roomiest || free == t.Roomiest && c.Index < cards[t.roomiestAt].Index {
			t.Roomiest, t.roomiestAt = free, i
		}
		if first || free < t.Tightest || free == t.Tightest && c.Index < cards[t.tightestAt].Index {
			t.Tightest, t.tightestAt = free, i
		}
		t.LargestHealthy = max(t.LargestHealthy, c.Memory)
	}
	return t
}

// Fit says whether a card has room for the request, or why none has: of the cards' reasons the mildest, for that is what
// it takes to find room there. The request must be positive.
func (t *Totals) Fit(request gpu.Memory) Reason {
	switch {
	case request <= t.Roomiest:
		return Fits
	case request <= t.LargestHealthy:
		return Full
	case request <= t.Largest:
		return Unhealthy
	case t.Largest == 0:
		return NotShared
	}
	return TooLarge
}

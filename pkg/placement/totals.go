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
	// MostFree is the free memory of the healthy card that has the most.
	MostFree gpu.Memory
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
		t.MostFree = max(t.MostFree, free)
		t.LargestHealthy = max(t.LargestHealthy, c.Memory)
	}
	return t
}

// Fit returns Fits if a card has room for the request, which must be positive, else the least severe reason.
func (t *Totals) Fit(request gpu.Memory) Reason {
	switch {
	case t.Largest == 0:
		return NotShared
	case request <= t.MostFree:
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

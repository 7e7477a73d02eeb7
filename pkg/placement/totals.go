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
	// Cards is the number of cards, FreeCores the sum of what they have free, FreeCoresHealthy that of the healthy ones.
	Cards                       int
	FreeCores, FreeCoresHealthy gpu.Cores
}

// Sum returns the totals of the cards.
func Sum(cards []Card) Totals {
	var t Totals
	for i := range cards {
		c := &cards[i]
		free := c.Free()
		t.Memory, t.Free = t.Memory.Add(c.Memory), t.Free.Add(free)
		cores := c.FreeCores()
		t.Cards, t.FreeCores = t.Cards+1, t.FreeCores+cores
		t.Largest = max(t.Largest, c.Memory)
		if c.Unhealthy {
			continue
		}
		t.FreeHealthy, t.FreeCoresHealthy = t.FreeHealthy.Add(free), t.FreeCoresHealthy+cores
		t.MostFree = max(t.MostFree, free)
		t.LargestHealthy = max(t.LargestHealthy, c.Memory)
	}
	return t
}

// Fit returns Fits if enough cards have room for the demand, whose memory must be positive, else the least severe reason. t must
// be Sum(cards).
func (t *Totals) Fit(cards []Card, demand gpu.Demand) Reason {
	room, healthy, large := t.count(cards, &demand)
	switch n := demand.Cards; {
	case t.Largest == 0:
		return NotShared
	case room >= n:
		return Fits
	case healthy >= n && demand.Total() <= t.FreeHealthy && demand.Cores*gpu.Cores(n) <= t.FreeCoresHealthy:
		return Fragmented
	case healthy >= n:
		return Full
	case large >= n:
		return Unhealthy
	}
	return TooLarge
}

// count returns how many cards have room for their share of the demand, how many healthy ones would have if they were empty, and how
// many of all. For a single card without cores the sums suffice, which show whether it is at least one.
func (t *Totals) count(cards []Card, demand *gpu.Demand) (room, healthy, large int) {
	if demand.Cards == 1 && demand.Cores == 0 {
		return atMost(demand.Memory, t.MostFree), atMost(demand.Memory, t.LargestHealthy), atMost(demand.Memory, t.Largest)
	}
	for i := range cards {
		c := &cards[i]
		if c.Memory < demand.Memory || gpu.CardCores < demand.Cores {
			continue
		}
		large++
		if !c.Unhealthy {
			healthy++
		}
		if c.fits(demand) {
			room++
		}
	}
	return room, healthy, large
}

// atMost returns 1 if the memory is at most the limit, else 0.
func atMost(memory, limit gpu.Memory) int {
	if memory <= limit {
		return 1
	}
	return 0
}

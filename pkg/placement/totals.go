package placement

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Totals are sums over a node's cards. They show whether a request fits without reading each card, which matters with
// thousands of nodes per pod. The owner must recompute them by Sum when a card changes.
type Totals struct {
	// The fields that are read for every node and pod come first.

	// Limited is true if some card has a limit of containers.
	Limited bool
	// MostFree is the free memory of the healthy card that has the most.
	MostFree gpu.Memory
	// Largest is the memory of the largest card, and LargestHealthy that of the largest healthy one.
	Largest, LargestHealthy gpu.Memory
	// Memory and Free are the sums over all cards.
	Memory, Free gpu.Memory
	// FreeHealthy is what the healthy cards have free together.
	FreeHealthy gpu.Memory
	// Cards is the number of cards, FreeCores the sum of what they have free, FreeCoresHealthy that of the healthy ones.
	Cards                       int
	FreeCores, FreeCoresHealthy gpu.Cores
}

// Sum returns the totals of the cards.
func Sum(cards []Card) Totals {
	t := Totals{Cards: len(cards)}
	var used, usedHealthy gpu.Cores
	healthy := 0
	for i := range cards {
		c := &cards[i]
		free, cores := c.Free(), min(c.UsedCores, gpu.CardCores)
		t.Memory, t.Free = t.Memory.Add(c.Memory), t.Free.Add(free)
		t.Limited = t.Limited || c.MaxContainers != 0
		t.Largest = max(t.Largest, c.Memory)
		used += cores
		if c.Unhealthy {
			continue
		}
		healthy, usedHealthy = healthy+1, usedHealthy+cores
		t.FreeHealthy = t.FreeHealthy.Add(free)
		t.MostFree = max(t.MostFree, free)
		t.LargestHealthy = max(t.LargestHealthy, c.Memory)
	}
	t.FreeCores, t.FreeCoresHealthy = gpu.CardCores*gpu.Cores(len(cards))-used, gpu.CardCores*gpu.Cores(healthy)-usedHealthy
	return t
}

// Fit returns Fits if enough cards have room for the demand, whose memory must be positive, else the reason that needs the smallest change. From
// the smallest: containers end on cards that have memory; free memory is on one card instead of several; memory comes free; cards become healthy.
// t must be Sum(cards).
func (t *Totals) Fit(cards []Card, demand *gpu.Demand) reasons.Reason {
	if !demand.MemoryOnly() || t.Limited {
		return t.fitCards(cards, demand)
	}
	// The sums suffice.
	switch request := demand.Memory; {
	case t.Largest == 0:
		return reasons.NotShared
	case request <= t.MostFree:
		return reasons.Fits
	case request <= t.LargestHealthy && request <= t.FreeHealthy:
		return reasons.Fragmented
	case request <= t.LargestHealthy:
		return reasons.Full
	case request <= t.Largest:
		return reasons.Unhealthy
	}
	return reasons.TooLarge
}

// fitCards is Fit for any demand. It reads the cards.
func (t *Totals) fitCards(cards []Card, demand *gpu.Demand) reasons.Reason {
	room, crowded, healthy, large := 0, 0, 0, 0
	for i := range cards {
		c := &cards[i]
		if c.Memory < demand.Memory || gpu.CardCores < demand.Cores || c.Lacks(demand) ||
			c.MaxContainers != 0 && c.MaxContainers < demand.Containers {
			continue
		}
		large++
		if c.Unhealthy {
			continue
		}
		healthy++
		switch {
		case c.Memory.Sub(c.Used) < demand.Memory || c.FreeCores() < demand.Cores:
		case c.MaxContainers == 0 || c.FreeContainers() >= demand.Containers:
			room++
		default:
			crowded++
		}
	}
	switch n := demand.Cards; {
	case t.Largest == 0:
		return reasons.NotShared
	case room >= n:
		return reasons.Fits
	case room+crowded >= n:
		return reasons.Crowded
	case healthy >= n && demand.Total() <= t.FreeHealthy && demand.Cores*gpu.Cores(n) <= t.FreeCoresHealthy:
		return reasons.Fragmented
	case healthy >= n:
		return reasons.Full
	case large >= n:
		return reasons.Unhealthy
	}
	return reasons.TooLarge
}

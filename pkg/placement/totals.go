package placement

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Totals are sums over a node's cards.
type Totals struct {
	// MostFree is the free memory of the healthy card that has the most, Largest the memory of the largest card.
	MostFree, Largest gpu.Memory
	// Memory and Free are the sums over all cards, FreeHealthy is what the healthy ones have free together.
	Memory, Free, FreeHealthy gpu.Memory
	// FreeCores is the sum of what all cards have free.
	FreeCores gpu.Cores
}

// Sum returns the totals of the cards.
func Sum(cards []Card) (t Totals) {
	for i := range cards {
		c := &cards[i]
		t.Memory, t.Free, t.FreeCores = t.Memory.Add(c.Memory), t.Free.Add(c.Free()), t.FreeCores+c.FreeCores()
		t.Largest = max(t.Largest, c.Memory)
		if !c.Unhealthy {
			t.FreeHealthy = t.FreeHealthy.Add(c.Free())
			t.MostFree = max(t.MostFree, c.Free())
		}
	}
	return t
}

// Fit returns Fits if enough cards have room for the demand, whose memory must be positive, else the reason that needs the smallest change. From
// the smallest: containers end on cards that have memory; free memory is on one card instead of several; memory comes free; cards become healthy.
func Fit(cards []Card, demand gpu.Demand) reasons.Reason {
	room, crowded, healthy, large := 0, 0, 0, 0
	var all, free gpu.Memory
	var freeCores gpu.Cores
	for i := range cards {
		c := &cards[i]
		all = all.Add(c.Memory)
		if !c.Unhealthy {
			free, freeCores = free.Add(c.Free()), freeCores+c.FreeCores()
		}
		switch fits := c.Fits(&demand); {
		case fits:
			room++
		case !c.fitsEmpty(&demand):
			continue
		case !c.Unhealthy && c.Free() >= demand.Memory && c.FreeCores() >= demand.Cores:
			crowded++
		}
		large++
		if !c.Unhealthy {
			healthy++
		}
	}
	switch n := demand.Cards; {
	case all == 0:
		return reasons.NotShared
	case room >= n:
		return reasons.Fits
	case room+crowded >= n:
		return reasons.Crowded
	case healthy >= n && demand.Total() <= free && demand.Cores*gpu.Cores(n) <= freeCores:
		return reasons.Fragmented
	case healthy >= n:
		return reasons.Full
	case large >= n:
		return reasons.Unhealthy
	}
	return reasons.TooLarge
}

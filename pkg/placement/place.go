package placement

import (
	"math"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Card holds the fields of a card that a placement depends on. It is small because thousands are read for every pod.
type Card struct {
	Index        int
	Memory, Used gpu.Memory
	UsedCores    gpu.Cores
	Links        Links
	Unhealthy    bool
}

// NewCard returns the card with the given used memory, and no used cores.
func NewCard(card gpu.Card, used gpu.Memory) Card {
	return Card{Index: card.Index, Memory: card.Memory, Used: used, Links: linksOf(card), Unhealthy: !card.Healthy()}
}

// Free returns the memory that can still be allocated; zero if more is allocated than the card has.
func (c Card) Free() gpu.Memory { return c.Memory.Sub(c.Used) }

// FreeCores returns the computing that can still be allocated; zero if more is allocated than the card has.
func (c Card) FreeCores() gpu.Cores { return gpu.CardCores.Sub(c.UsedCores) }

// fits reports whether the card has room for its share of the demand.
func (c *Card) fits(d *gpu.Demand) bool {
	return !c.Unhealthy && c.Free() >= d.Memory && c.FreeCores() >= d.Cores
}

// Room returns what is free in the scarcer dimension: the free memory, or the same fraction of the card's memory as of its cores
// is free, if that is less.
func (c *Card) Room() gpu.Memory {
	if c.UsedCores == 0 {
		return c.Free()
	}
	return min(c.Free(), c.likeCores())
}

// likeCores returns the same fraction of the card's memory as of its cores is free.
func (c *Card) likeCores() gpu.Memory {
	if c.Memory > math.MaxInt64/gpu.Memory(gpu.CardCores) {
		return c.Memory / gpu.Memory(gpu.CardCores) * gpu.Memory(c.FreeCores())
	}
	return c.Memory * gpu.Memory(c.FreeCores()) / gpu.Memory(gpu.CardCores)
}

// Place returns the cards that the policy prefers among those with room for the demand, ordered by index. Of several cards that are
// packed equally, it takes those that are connected best, and then those with the lowest indexes. The demand's memory must be positive.
func Place(policy Policy, cards []Card, demand gpu.Demand) (gpu.Placement, Reason) {
	totals := Sum(cards)
	if reason := totals.Fit(cards, &demand); reason != Fits {
		return nil, reason
	}
	chosen := policy.choose(cards, &demand, nil)
	if demand.Cards > 1 {
		connect(cards, chosen)
	}
	for i, position := range chosen {
		chosen[i] = cards[position].Index
	}
	slices.Sort(chosen)
	return demand.On(chosen...), Fits
}

// choose appends to chosen, which must be empty, the positions of the cards that the policy prefers among those with room for
// the demand, in order. There must be enough of them.
func (p *Policy) choose(cards []Card, demand *gpu.Demand, chosen []int) []int {
	better := p.better
	if demand.Cards == 1 && demand.Cores == 0 {
		return append(chosen, best(cards, demand.Memory, better))
	}
	for i := range cards {
		c := &cards[i]
		if !c.fits(demand) {
			continue
		}
		at := len(chosen)
		for at > 0 {
			other := &cards[chosen[at-1]]
			if !better(c, other) && (c.Index > other.Index || better(other, c)) {
				break
			}
			at--
		}
		switch {
		case len(chosen) < demand.Cards:
			chosen = slices.Insert(chosen, at, i)
		case at < demand.Cards:
			copy(chosen[at+1:], chosen[at:])
			chosen[at] = i
		}
	}
	return chosen
}

// best is choose for memory of one card, which is faster: it runs for thousands of nodes per pod.
func best(cards []Card, request gpu.Memory, better func(a, b *Card) bool) (position int) {
	var chosen *Card
	for i := range cards {
		c := &cards[i]
		switch {
		case c.Unhealthy || c.Free() < request:
		case chosen == nil || better(c, chosen) || c.Index < chosen.Index && !better(chosen, c):
			chosen, position = c, i
		}
	}
	return position
}

// Fit returns the reason that Place returns, without allocating memory: it runs for thousands of nodes per pod.
func Fit(cards []Card, demand gpu.Demand) Reason {
	totals := Sum(cards)
	return totals.Fit(cards, &demand)
}

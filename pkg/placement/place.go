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
	// Containers is the number of containers that have a share of the card, MaxContainers how many can have one; 0 if there is no
	// such limit.
	Containers, MaxContainers int32
	Links                     Links
	Unhealthy                 bool
}

// NewCard returns the card with the given used memory, and no used cores or containers.
func NewCard(card gpu.Card, used gpu.Memory) Card {
	return Card{
		Index: card.Index, Memory: card.Memory, Used: used, Links: linksOf(card), Unhealthy: !card.Healthy(),
		MaxContainers: int32(min(max(card.MaxContainers, 0), math.MaxInt32)),
	}
}

// Add counts a share as used.
func (c *Card) Add(s gpu.Share) {
	c.Used, c.UsedCores, c.Containers = c.Used.Add(s.Memory), c.UsedCores.Add(s.Cores), c.Containers+s.Containers
}

// Subtract undoes Add.
func (c *Card) Subtract(s gpu.Share) {
	c.Used, c.UsedCores, c.Containers = c.Used.Sub(s.Memory), c.UsedCores.Sub(s.Cores), max(c.Containers-s.Containers, 0)
}

// Empty returns the card with nothing used.
func (c Card) Empty() Card {
	c.Used, c.UsedCores, c.Containers = 0, 0, 0
	return c
}

// Free returns the memory that can still be allocated; zero if more is allocated than the card has.
func (c Card) Free() gpu.Memory { return c.Memory.Sub(c.Used) }

// FreeCores returns the computing that can still be allocated; zero if more is allocated than the card has.
func (c Card) FreeCores() gpu.Cores { return gpu.CardCores.Sub(c.UsedCores) }

// FreeContainers returns how many more containers can have a share of the card.
func (c *Card) FreeContainers() int32 {
	if c.MaxContainers == 0 {
		return math.MaxInt32
	}
	return max(c.MaxContainers-c.Containers, 0)
}

// Has reports whether a share is free, on a healthy card or not.
func (c *Card) Has(s gpu.Share) bool {
	return c.Free() >= s.Memory && c.FreeCores() >= s.Cores && c.FreeContainers() >= s.Containers
}

// Overfull reports whether more is allocated than the card has.
func (c *Card) Overfull() bool {
	return c.Used > c.Memory || c.UsedCores > gpu.CardCores || c.MaxContainers > 0 && c.Containers > c.MaxContainers
}

// Fits reports whether the card has room for its share of the demand.
func (c *Card) Fits(d *gpu.Demand) bool {
	return !c.Unhealthy && c.Has(gpu.Share{Memory: d.Memory, Cores: d.Cores, Containers: d.Containers})
}

// Room returns what is free in the scarcer dimension: the free memory, or the same fraction of the card's memory as of its cores
// is free, if that is less.
func (c *Card) Room() gpu.Memory {
	if c.UsedCores != 0 {
		return c.scarcer()
	}
	return c.Memory.Sub(c.Used)
}

// scarcer is Room for a card of which cores are used.
func (c *Card) scarcer() gpu.Memory {
	if c.Memory > math.MaxInt64/gpu.Memory(gpu.CardCores) {
		return min(c.Free(), c.Memory/gpu.Memory(gpu.CardCores)*gpu.Memory(c.FreeCores()))
	}
	return min(c.Free(), c.Memory*gpu.Memory(c.FreeCores())/gpu.Memory(gpu.CardCores))
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
		connect(cards, chosen, &demand)
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
		return append(chosen, best(cards, demand, better))
	}
	for i := range cards {
		c := &cards[i]
		if !c.Fits(demand) {
			continue
		}
		at, room := len(chosen), c.Room()
		for at > 0 {
			other := &cards[chosen[at-1]]
			if !better(room, other.Room()) && (c.Index > other.Index || better(other.Room(), room)) {
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
func best(cards []Card, demand *gpu.Demand, better func(a, b gpu.Memory) bool) int {
	chosen, most := -1, gpu.Memory(0)
	for i := range cards {
		c := &cards[i]
		room := c.Memory.Sub(c.Used) // Room is too long to be inlined.
		if c.Unhealthy || room < demand.Memory || c.MaxContainers != 0 && c.FreeContainers() < demand.Containers {
			continue
		}
		if c.UsedCores != 0 {
			room = c.scarcer()
		}
		if chosen < 0 || better(room, most) || c.Index < cards[chosen].Index && !better(most, room) {
			chosen, most = i, room
		}
	}
	return chosen
}

// Fit returns the reason that Place returns, without allocating memory: it runs for thousands of nodes per pod.
func Fit(cards []Card, demand gpu.Demand) Reason {
	totals := Sum(cards)
	return totals.Fit(cards, &demand)
}

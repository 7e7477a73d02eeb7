package placement

import (
	"math"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
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
	// NearAdapter is true if an active port of an RDMA adapter is near.
	NearAdapter bool
}

// NewCard returns the card with the given used memory, and no used cores or containers.
func NewCard(card gpu.Card, used gpu.Memory) Card {
	return Card{
		Index: card.Index, Memory: card.Memory, Used: used, Links: linksOf(card), Unhealthy: !card.Healthy(), NearAdapter: card.RDMAPorts != "",
		MaxContainers: int32(min(max(card.MaxContainers, 0), math.MaxInt32)),
	}
}

// Add counts a share as used.
func (c *Card) Add(s gpu.Share) {
	c.Used = c.Used.Add(s.Memory)
	c.UsedCores = c.UsedCores.Add(s.Cores)
	c.Containers += s.Containers
}

// Subtract undoes Add.
func (c *Card) Subtract(s gpu.Share) {
	c.Used = c.Used.Sub(s.Memory)
	c.UsedCores = c.UsedCores.Sub(s.Cores)
	c.Containers = max(c.Containers-s.Containers, 0)
}

// Position returns the position of the card with the given index in cards, which are ordered by index.
func Position(cards []Card, index int) (int, bool) {
	if index >= 0 && index < len(cards) && cards[index].Index == index {
		return index, true // On nearly all nodes, cards are numbered from 0 on.
	}
	return slices.BinarySearchFunc(cards, index, func(c Card, index int) int { return c.Index - index })
}

// Use counts a placement as used on the cards, which are ordered by index. Cards that don't exist count for nothing.
func Use(cards []Card, where gpu.Placement) {
	for _, share := range where {
		if i, ok := Position(cards, share.Card); ok {
			cards[i].Add(share)
		}
	}
}

// Release undoes Use.
func Release(cards []Card, where gpu.Placement) {
	for _, share := range where {
		if i, ok := Position(cards, share.Card); ok {
			cards[i].Subtract(share)
		}
	}
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

// Lacks reports whether the demand needs something that the card doesn't have, whatever is free there: an adapter near it.
func (c *Card) Lacks(d *gpu.Demand) bool { return d.RDMA == gpu.RDMARequired && !c.NearAdapter }

// Fits reports whether the card has room for its share of the demand.
func (c *Card) Fits(d *gpu.Demand) bool {
	return !c.Unhealthy && !c.Lacks(d) && c.Has(gpu.Share{Memory: d.Memory, Cores: d.Cores, Containers: d.Containers})
}

// fitsEmpty is Fits for the card if it were healthy and nothing were used.
func (c *Card) fitsEmpty(d *gpu.Demand) bool {
	return !c.Lacks(d) && d.Memory <= c.Memory && d.Cores <= gpu.CardCores && (c.MaxContainers == 0 || d.Containers <= c.MaxContainers)
}

// Room returns what is free in the scarcer dimension, as memory: the free memory, or the card's memory times the free fraction of
// its cores, whichever is less.
func (c *Card) Room() gpu.Memory {
	if c.UsedCores == 0 {
		return c.Free()
	}
	if c.Memory > math.MaxInt64/gpu.Memory(gpu.CardCores) {
		return min(c.Free(), c.Memory/gpu.Memory(gpu.CardCores)*gpu.Memory(c.FreeCores()))
	}
	return min(c.Free(), c.Memory*gpu.Memory(c.FreeCores())/gpu.Memory(gpu.CardCores))
}

// Place returns the cards that the policy prefers among those with room for the demand, ordered by index. Of several cards that are
// packed equally, it takes those near an adapter if the demand prefers it, then those that are connected best, and then those with the lowest
// indexes. The demand's memory must be positive.
func Place(policy Policy, cards []Card, demand gpu.Demand) (gpu.Placement, reasons.Reason) {
	if reason := Fit(cards, demand); reason != reasons.Fits {
		return nil, reason
	}
	var buffer [usualCards]pick
	picks := policy.choose(cards, &demand, buffer[:0])
	chosen := make([]int, len(picks))
	for i, p := range picks {
		chosen[i] = p.position
	}
	if demand.Cards > 1 {
		connect(cards, chosen, &demand)
	}
	for i, position := range chosen {
		chosen[i] = cards[position].Index
	}
	slices.Sort(chosen)
	return demand.On(chosen...), reasons.Fits
}

// pick is a card with room for the demand, by its position.
type pick struct {
	position int
	room     gpu.Memory
}

// usualCards is as many cards as most pods ask for.
const usualCards = 8

// choose appends to picks, which must be empty, the cards that the policy prefers among those with room for the demand, in order. If
// too few have room, it appends those.
func (p *Policy) choose(cards []Card, demand *gpu.Demand, picks []pick) []pick {
	better := p.better
	for i := range cards {
		c := &cards[i]
		if !c.Fits(demand) {
			continue
		}
		room := c.Room()
		precedes := func(o *pick) bool {
			other := &cards[o.position]
			first := c.Index < other.Index
			if demand.RDMA == gpu.RDMAPreferred && c.NearAdapter != other.NearAdapter {
				first = c.NearAdapter
			}
			return better(room, o.room) || first && !better(o.room, room)
		}
		at := len(picks)
		switch {
		case at < demand.Cards:
			picks = append(picks, pick{})
		case precedes(&picks[at-1]):
			at--
		default:
			continue
		}
		for ; at > 0 && precedes(&picks[at-1]); at-- {
			picks[at] = picks[at-1]
		}
		picks[at] = pick{i, room}
	}
	return picks
}

package placement

import (
	"math"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Links are a card's connections to the other cards of its node. Cards with the same positive value are connected.
type Links struct {
	NVLink, PCIeSwitch, NUMANode uint8
}

func linksOf(card gpu.Card) Links {
	number := func(n int) uint8 { // Unknown if it is too large, which no machine has.
		if n < 0 || n > math.MaxUint8 {
			return 0
		}
		return uint8(n)
	}
	return Links{NVLink: number(card.NVLink), PCIeSwitch: number(card.PCIeSwitch), NUMANode: number(card.NUMANode + 1)}
}

// The values of connections between two cards, the weakest first. One connection of a better kind outweighs the weaker
// connections of all pairs of MaxCards cards.
const (
	sameNUMANode   = 1
	samePCIeSwitch = sameNUMANode * gpu.MaxCards * gpu.MaxCards
	sameNVLink     = samePCIeSwitch * gpu.MaxCards * gpu.MaxCards
)

// strength returns the value of the connection between two cards.
func (l Links) strength(o Links) int {
	switch {
	case l.NVLink != 0 && l.NVLink == o.NVLink:
		return sameNVLink
	case l.PCIeSwitch != 0 && l.PCIeSwitch == o.PCIeSwitch:
		return samePCIeSwitch
	case l.NUMANode != 0 && l.NUMANode == o.NUMANode:
		return sameNUMANode
	}
	return 0
}

// connect replaces cards at the end of chosen by better connected ones that are packed equally. chosen has the positions of the
// preferred cards for the demand in order.
func connect(cards []Card, chosen []int, demand *gpu.Demand) {
	last := cards[chosen[len(chosen)-1]]
	equal := func(c *Card) bool {
		return c.Fits(demand) && c.Memory == last.Memory && c.Used == last.Used && c.UsedCores == last.UsedCores &&
			(demand.RDMA == gpu.RDMANone || c.NearAdapter == last.NearAdapter)
	}
	fixed := slices.DeleteFunc(slices.Clone(chosen), func(i int) bool { return equal(&cards[i]) })
	s := search{cards: cards, n: len(chosen), most: -1}
	for i := range cards {
		if equal(&cards[i]) {
			s.free = append(s.free, i)
		}
	}
	if s.n-len(fixed) < len(s.free) {
		slices.SortFunc(s.free, func(a, b int) int { return cards[a].Index - cards[b].Index })
		s.findAlike()
		s.extend(fixed, 0, 0)
		copy(chosen, s.best)
	}
}

// search finds the best connected set of n cards.
type search struct {
	cards []Card
	// free are the positions of the cards to choose from. alike has for each of them the one before it with equal links, or -1.
	free, alike []int
	n           int
	// best is the best set so far, and most the sum of the connections that its cards of free have.
	best []int
	most int
	// steps counts the calls of extend.
	steps int
}

// maxSteps is enough to try all sets of 8 cards out of 16, however they are connected. If it isn't enough, the best set so far is taken.
const maxSteps = 1 << 15

// findAlike sets alike.
func (s *search) findAlike() {
	last := map[Links]int{}
	for _, card := range s.free {
		before, some := last[s.cards[card].Links]
		if !some {
			before = -1
		}
		s.alike = append(s.alike, before)
		last[s.cards[card].Links] = card
	}
}

// extend tries all sets of the given cards and free ones from the position on. value is the sum of the connections. Of cards with equal
// links it takes the first ones, since others are connected in the same way: most machines have few kinds of cards, and so few sets.
func (s *search) extend(set []int, value, from int) {
	s.steps++
	if len(set) == s.n {
		if value > s.most {
			s.best, s.most = slices.Clone(set), value
		}
		return
	}
	for i := from; len(s.free)-i >= s.n-len(set) && s.steps < maxSteps; i++ {
		card := s.free[i]
		if before := s.alike[i]; before < 0 || slices.Contains(set, before) {
			s.extend(append(set, card), value+s.connection(set, card), i+1)
		}
	}
}

// connection returns the sum of the connections of a card to those of a set.
func (s *search) connection(set []int, card int) (value int) {
	for _, i := range set {
		value += s.cards[i].Links.strength(s.cards[card].Links)
	}
	return value
}

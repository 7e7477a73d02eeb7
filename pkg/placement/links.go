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

// to returns the value of the connection between two cards.
func (l Links) to(o Links) int {
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
		return c.Fits(demand) && c.Memory == last.Memory && c.Used == last.Used && c.UsedCores == last.UsedCores
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
		s.extend(fixed, 0, 0)
		copy(chosen, s.best)
	}
}

// search finds the best connected set of n cards.
type search struct {
	cards []Card
	// free are the positions of the cards to choose from.
	free []int
	n    int
	// best is the best set so far, and most the sum of the connections that its cards of free have.
	best []int
	most int
	// tried is the number of sets that were tried.
	tried int
}

// maxTried is more sets than there are of 8 cards out of 16. With more cards, the best of the first sets is taken.
const maxTried = 1 << 14

// extend tries all sets of the given cards and free ones from the position on. value is the sum of the connections.
func (s *search) extend(set []int, value, from int) {
	if len(set) == s.n {
		s.tried++
		if value > s.most {
			s.best, s.most = slices.Clone(set), value
		}
		return
	}
	for i := from; len(s.free)-i >= s.n-len(set) && s.tried < maxTried; i++ {
		card := s.free[i]
		s.extend(append(set, card), value+s.connection(set, card), i+1)
	}
}

// connection returns the sum of the connections of a card to those of a set.
func (s *search) connection(set []int, card int) (value int) {
	for _, i := range set {
		value += s.cards[i].Links.to(s.cards[card].Links)
	}
	return value
}

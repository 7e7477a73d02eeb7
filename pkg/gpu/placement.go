package gpu

import (
	"slices"
	"strconv"
	"strings"
)

// Share is a part of one card.
type Share struct {
	// Card is the card's index on its node.
	Card   int
	Memory Memory
	// Cores is zero for a pod that doesn't ask for computing: it is not limited and charged nothing.
	Cores Cores
	// Containers is the number of the pod's containers that have a part of it.
	Containers int32
}

// Placement lists the cards of its node that a pod uses, with its share of each.
type Placement []Share

// On returns a placement of one container on a single card, without cores.
func On(card int, memory Memory) Placement {
	return Placement{{Card: card, Memory: memory, Containers: 1}}
}

// Total returns the memory over all cards.
func (p Placement) Total() Memory {
	var sum Memory
	for _, s := range p {
		sum = sum.Add(s.Memory)
	}
	return sum
}

// Cards returns the indexes of the cards.
func (p Placement) Cards() []int {
	cards := make([]int, len(p))
	for i, s := range p {
		cards[i] = s.Card
	}
	return cards
}

// Equal reports whether both name the same cards with the same shares, in the same order.
func (p Placement) Equal(o Placement) bool { return slices.Equal(p, o) }

// String returns the cards, such as "card 1" or "cards 0, 2".
func (p Placement) String() string {
	if len(p) == 0 {
		return "no card"
	}
	names := make([]string, len(p))
	for i, s := range p {
		names[i] = strconv.Itoa(s.Card)
	}
	if len(p) == 1 {
		return "card " + names[0]
	}
	return "cards " + strings.Join(names, ", ")
}

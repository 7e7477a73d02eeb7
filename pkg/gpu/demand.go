package gpu

import "math"

// MaxCards is the largest number of cards that a pod can have.
const MaxCards = 64

// MaxNodeCards is the largest number of cards of a node: more than any machine has. Every card is a row or a column in metrics, in
// kubectl inspect gpushare and on the page, so a node that claims more is treated as bad input.
const MaxNodeCards = 256

// Demand is what a pod asks for of one node: the same share of each of a number of distinct cards.
type Demand struct {
	// Cards is the number of cards, at least 1.
	Cards int
	// Memory and Cores are for each card.
	Memory Memory
	Cores  Cores
	// Containers is the number of containers that have a share of each card.
	Containers int32
	// SharedMemory is true if one of these containers has a volume of its own for shared memory.
	SharedMemory bool
	// RDMA is whether the cards must be near an adapter.
	RDMA RDMA
	// Limits are those of containers that may use more than they request.
	Limits Limits
}

// Demand returns what the pod asks for of each card. Amounts that can't be divided evenly are rounded up, so that a pod with an
// invalid request, which may be bound all the same, is never counted with less than it asks for.
func (p Pod) Demand() Demand {
	n, containers := p.NumCards(), max(p.Containers, 1)
	if n == 1 {
		return Demand{1, p.Request, p.Cores, containers, p.SharedMemory, p.RDMA, p.Limits}
	}
	return Demand{n, p.Request.perCard(n), p.Cores.PerCard(n), containers, p.SharedMemory, p.RDMA, p.Limits}
}

// MemoryOnly reports whether the demand is for memory of any one card, with or without a preference.
func (d *Demand) MemoryOnly() bool { return d.Cards == 1 && d.Cores == 0 && d.RDMA != RDMARequired }

// NumCards returns the number of cards that the pod asks for, at least 1.
func (p Pod) NumCards() int { return max(p.Cards, 1) }

// On returns the placement on these cards.
func (d Demand) On(cards ...int) Placement {
	where := make(Placement, len(cards))
	for i, card := range cards {
		where[i] = Share{card, d.Memory, d.Cores, d.Containers}
	}
	return where
}

// Total returns the memory over all cards.
func (d *Demand) Total() Memory {
	if d.Cards > 1 && d.Memory > math.MaxInt64/Memory(d.Cards) {
		return math.MaxInt64
	}
	return d.Memory * Memory(d.Cards)
}

// perCard returns the amount on each of n cards, rounded up.
func (m Memory) perCard(n int) Memory { return m/Memory(n) + min(m%Memory(n), 1) }

// PerCard returns the amount on each of n cards, rounded up.
func (c Cores) PerCard(n int) Cores { return c/Cores(n) + min(c%Cores(n), 1) }

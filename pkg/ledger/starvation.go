package ledger

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// ReserveForStarving makes the starvation reservation: shares of cards for all requests, each on the emptiest cards. The cards may still be in
// use, and become available when pods end. It replaces an earlier one. It reserves nothing and returns false if the requests don't fit even on
// empty cards, or don't fit by capacity. If all fit, the pods are taken from capacity. label names the pods for users.
func (l *Ledger) ReserveForStarving(requests []Request, priority int32, label string, capacity Capacity) (reserved bool) {
	l.update(func() (freed []string) {
		freed = l.replace(slices.Collect(maps.Keys(l.reservations.bySource[Starving])), nil)
		reserved = l.reserveForStarving(requests, priority, label, capacity)
		return freed
	})
	return reserved
}

func (l *Ledger) reserveForStarving(requests []Request, priority int32, label string, capacity Capacity) (reserved bool) {
	made := l.addReservation(Reservation{Source: Starving, Label: label, Priority: priority, Lasting: true})
	rate := func(n *node, request *Request, _ int) (float64, bool) { return n.rateEmptiest(request, made) }
	ranks := rankings{ledger: l, rate: rate, put: func(name string, n *node, pod gpu.Pod) bool {
		if capacity != nil && !capacity.Take(name, pod.UID) {
			return false
		}
		demand, share := pod.Demand(), Share{Pod: pod, Node: name}
		for _, card := range n.emptiest(&demand, made) {
			share.On = append(share.On, demand.On(card.Index)...)
		}
		l.addShare(made, share)
		return true
	}}
	for i := range requests {
		request := &requests[i]
		if _, allocated := l.nodeOf[request.Pod.UID]; allocated {
			continue
		}
		if _, ok := ranks.first(requests[i:]).place(request.Pod); !ok {
			l.endReservation(made)
			for _, share := range made.Shares {
				if capacity != nil {
					capacity.Return(share.Node, share.Pod.UID)
				}
			}
			return false
		}
	}
	return true
}

// StarvationUsable reports whether the nodes of the starvation reservation still take its pods, and its cards exist, are healthy, and
// would hold what is reserved on them if they were empty. It returns false if there is no reservation.
func (l *Ledger) StarvationUsable() bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for r := range l.reservations.bySource[Starving] {
		return !slices.ContainsFunc(r.Shares, func(share Share) bool {
			n, demand := l.nodes[share.Node], share.Pod.Demand()
			return n.accepts(&demand) != reasons.Fits || !n.couldHold(r, share.On)
		})
	}
	return false
}

// couldHold reports whether the cards would hold what the reservation has of them if they were empty.
func (n *node) couldHold(r *Reservation, on gpu.Placement) bool {
	for _, share := range on {
		i, ok := n.position(share.Card)
		if !ok || n.cards[i].Unhealthy {
			return false
		}
		if empty := n.cards[i].Empty(); !empty.Has(n.reservedBy(r, share.Card)) {
			return false
		}
	}
	return true
}

// StarvationLabel returns the label of the starvation reservation; empty if there is none.
func (l *Ledger) StarvationLabel() string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for r := range l.reservations.bySource[Starving] {
		return r.Label
	}
	return ""
}

// rateEmptiest rates a node by the free room of the fullest of the cards that emptiest returns. It is called for each node under the lock, so it
// copies no cards.
func (n *node) rateEmptiest(request *Request, made *Reservation) (rate float64, fits bool) {
	var buffer [16]gpu.Memory
	demand := request.Pod.Demand()
	if n.accepts(&demand) != reasons.Fits {
		return 0, false
	}
	rooms := buffer[:0]
	for i := range n.cards {
		if left, ok := n.roomForStarving(&n.cards[i], &demand, made); ok {
			rooms = append(rooms, left.Room())
		}
	}
	if len(rooms) < demand.Cards {
		return 0, false
	}
	slices.Sort(rooms)
	return float64(rooms[len(rooms)-demand.Cards]), true
}

// emptiest returns the emptiest cards for the demand, among the cards that could hold it if they were empty. The emptiest card is the first. The
// reservation that is being made counts as used. If there are too few cards, emptiest returns none.
func (n *node) emptiest(demand *gpu.Demand, made *Reservation) (cards []placement.Card) {
	if n.accepts(demand) != reasons.Fits {
		return nil
	}
	for i := range n.cards {
		if left, ok := n.roomForStarving(&n.cards[i], demand, made); ok {
			cards = append(cards, left)
		}
	}
	if len(cards) < demand.Cards {
		return nil
	}
	slices.SortStableFunc(cards, func(a, b placement.Card) int { return cmp.Compare(b.Room(), a.Room()) })
	return cards[:demand.Cards]
}

// roomForStarving returns the card with the reservation that is being made counted as used. ok is false if it couldn't hold the demand even if
// it were empty otherwise.
func (n *node) roomForStarving(c *placement.Card, demand *gpu.Demand, made *Reservation) (left placement.Card, ok bool) {
	empty, left := c.Empty(), *c
	if len(n.reserved) > 0 {
		reserved := n.reservedBy(made, c.Index)
		empty.Add(reserved)
		left.Add(reserved)
	}
	return left, empty.Fits(demand)
}

// reservedBy returns what the reservation has of the card with this index.
func (n *node) reservedBy(r *Reservation, index int) (sum gpu.Share) {
	for i := range n.reserved {
		if n.reserved[i].Reservation != r {
			continue
		}
		for _, share := range n.reserved[i].On {
			if share.Card == index {
				sum.Memory, sum.Cores, sum.Containers = sum.Memory.Add(share.Memory), sum.Cores.Add(share.Cores), sum.Containers+share.Containers
			}
		}
	}
	return sum
}

// StarvationIdle returns the memory that the starvation reservation keeps from other pods now.
func (l *Ledger) StarvationIdle() (idle gpu.Memory) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for r := range l.reservations.bySource[Starving] {
		for name := range l.reservations.byNode {
			if n := l.nodes[name]; n != nil {
				for _, c := range n.cards {
					idle = idle.Add(min(n.reservedBy(r, c.Index).Memory, c.Free()))
				}
			}
		}
	}
	return idle
}

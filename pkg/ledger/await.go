package ledger

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Item is an item of the queue: a pod, or several pods that get their places together.
type Item struct {
	// ID identifies the item, and Label names it for users.
	ID, Label string
	// First, Priority and Entered, the time at which the item entered the queue, are the item's rank. First is true for an item that comes before
	// all others, whatever their priorities: what a broken run of a group still needs.
	First    bool
	Priority int32
	Entered  time.Time
}

// Compare orders items by their ranks. It returns a negative number if the item comes before the other one.
func (i *Item) Compare(o *Item) int {
	if i.First != o.First {
		if i.First {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(o.Priority, i.Priority), i.Entered.Compare(o.Entered), cmp.Compare(i.ID, o.ID))
}

// Before reports whether the item comes before the other one.
func (i *Item) Before(o *Item) bool { return i.Compare(o) < 0 }

// Await makes the awaited reservation of an item: shares of cards for all requests. The cards may still be in use, and become available when
// pods end. It replaces an earlier reservation of the item.
//
// It takes the cards on which all requests fit if the youngest pods have ended: those that were placed after a time that is as late as possible,
// and later than oldest. Run times are unknown, and a pod that has run for long will likely run for long. The awaited reservations of items that come
// before count as pods that stay. If the requests don't fit then, these count as pods that end.
//
// If the requests don't fit, also not by capacity, there is no reservation for the item, and Await returns false. If all fit, the pods are taken
// from capacity.
func (l *Ledger) Await(item Item, requests []Request, oldest time.Time, capacity Capacity) (made bool) {
	l.update(func() (freed []string) {
		freed = l.endAwaited(item.ID)
		for _, beside := range []bool{true, false} {
			c := awaitedChoice{Ledger: l, oldest: oldest, beside: beside, capacity: capacity}
			if made = c.choose(item, requests); made {
				break
			}
		}
		return freed
	})
	return made
}

// EndAwaited ends the awaited reservation of an item, if there is one.
func (l *Ledger) EndAwaited(id string) {
	l.update(func() []string { return l.endAwaited(id) })
}

func (l *Ledger) endAwaited(id string) (freed []string) {
	if r := l.reservations.items[id]; r != nil {
		delete(l.reservations.items, id)
		freed = l.endReservation(r)
		slices.Sort(freed)
	}
	return slices.Compact(freed)
}

// AwaitedUsable reports whether the item's awaited reservation is for these requests and for the item's rank, the nodes still take its pods, and
// its cards exist, are healthy, and would hold what is reserved on them if they were empty. It returns false if there is no reservation.
func (l *Ledger) AwaitedUsable(item Item, requests []Request) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := l.reservations.items[item.ID]
	return r != nil && r.Item == item && l.isFor(r, requests) && !slices.ContainsFunc(r.Shares, func(share Share) bool {
		n, demand := l.nodes[share.Node], share.Pod.Demand()
		return n.accepts(&demand) != reasons.Fits || !n.couldHold(r, share.On)
	})
}

// isFor reports whether the reservation has a share for each pod without an allocation, and no others.
func (l *Ledger) isFor(r *Reservation, requests []Request) bool {
	missing := map[gpu.PodUID]bool{}
	for i := range requests {
		if _, allocated := l.nodeOf[requests[i].Pod.UID]; !allocated {
			missing[requests[i].Pod.UID] = true
		}
	}
	for i := range r.Shares {
		uid := r.Shares[i].Pod.UID
		if _, allocated := l.nodeOf[uid]; !allocated && !missing[uid] {
			return false
		}
		delete(missing, uid)
	}
	return len(missing) == 0
}

// AwaitedFree reports whether all that the item's awaited reservation has is free, and no other reservation keeps it from the item.
func (l *Ledger) AwaitedFree(id string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := l.reservations.items[id]
	return r != nil && !slices.ContainsFunc(r.Shares, func(share Share) bool {
		n := l.nodes[share.Node]
		if n == nil {
			return true
		}
		cards := l.cardsFor(n, &share.Pod, true, nil)
		return slices.ContainsFunc(share.On, func(on gpu.Share) bool {
			i, ok := n.position(on.Card)
			return !ok || !cards[i].Has(n.reservedBy(r, on.Card))
		})
	})
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

// Awaits reports whether the pod belongs to an item with an awaited reservation.
func (l *Ledger) Awaits(uid gpu.PodUID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.reservations.byPod[uid][Queued] != nil
}

// Awaited returns what an item's awaited reservation has on each node; nil if there is none.
func (l *Ledger) Awaited(id string) map[string]gpu.Memory {
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := l.reservations.items[id]
	if r == nil {
		return nil
	}
	out := map[string]gpu.Memory{}
	for _, share := range r.Shares {
		out[share.Node] = out[share.Node].Add(share.On.Total())
	}
	return out
}

// AwaitedLabel returns the label of the item that comes first, of those with an awaited reservation; empty if there is none.
func (l *Ledger) AwaitedLabel() string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	var first *Reservation
	for _, r := range l.reservations.items {
		if first == nil || r.Item.Before(&first.Item) {
			first = r
		}
	}
	if first == nil {
		return ""
	}
	return first.Label
}

// AwaitedIdle returns the memory that each item's awaited reservation keeps from other pods now, by the item's ID: what is free on its cards.
func (l *Ledger) AwaitedIdle() map[string]gpu.Memory {
	l.mu.RLock()
	defer l.mu.RUnlock()
	out := make(map[string]gpu.Memory, len(l.reservations.items))
	for id, r := range l.reservations.items {
		out[id] = l.idle(r)
	}
	return out
}

func (l *Ledger) idle(r *Reservation) (idle gpu.Memory) {
	type card struct {
		node  string
		index int
	}
	kept := map[card]gpu.Memory{}
	for _, share := range r.Shares {
		if _, allocated := l.nodeOf[share.Pod.UID]; !allocated {
			for _, s := range share.On {
				kept[card{share.Node, s.Card}] += s.Memory
			}
		}
	}
	for on, amount := range kept {
		if n := l.nodes[on.node]; n != nil {
			if i, ok := n.position(on.index); ok {
				idle = idle.Add(min(amount, n.cards[i].Free()))
			}
		}
	}
	return idle
}

// awaitedChoice is one choice of cards, see Await. The ledger's lock is held throughout.
type awaitedChoice struct {
	*Ledger
	made     *Reservation
	oldest   time.Time
	beside   bool
	capacity Capacity
}

// choose adds the reservation. It returns false, and changes nothing, if the requests don't fit.
func (c *awaitedChoice) choose(item Item, requests []Request) bool {
	c.made = c.addReservation(Reservation{Source: Queued, Item: item, Label: item.Label, Priority: item.Priority})
	rate := func(n *node, request *Request, _ int) (float64, bool) {
		demand := request.Pod.Demand()
		cards := c.freeable(n, &demand)
		if len(cards) < demand.Cards {
			return 0, false
		}
		return cards[demand.Cards-1].since.Sub(c.oldest).Seconds(), true
	}
	ranks := rankings{ledger: c.Ledger, rate: rate, put: c.put}
	for i := range requests {
		if _, allocated := c.nodeOf[requests[i].Pod.UID]; allocated {
			continue
		}
		if _, ok := ranks.first(requests[i:]).place(requests[i].Pod); !ok {
			c.undo()
			return false
		}
	}
	c.reservations.items[item.ID] = c.made
	return true
}

// put adds a share for the pod on the node.
func (c *awaitedChoice) put(name string, n *node, pod gpu.Pod) bool {
	if c.capacity != nil && !c.capacity.Take(name, pod.UID) {
		return false
	}
	demand, share := pod.Demand(), Share{Pod: pod, Node: name}
	for _, card := range c.freeable(n, &demand)[:demand.Cards] {
		share.On = append(share.On, demand.On(card.index)...)
	}
	c.addShare(c.made, share)
	return true
}

func (c *awaitedChoice) undo() {
	c.endReservation(c.made)
	for _, share := range c.made.Shares {
		if c.capacity != nil {
			c.capacity.Return(share.Node, share.Pod.UID)
		}
	}
}

// freeableCard is a card on which a demand fits if the pods that were placed there at a time, or later, have ended.
type freeableCard struct {
	index int
	since time.Time
}

// freeable returns the cards of a node on which the demand fits if the pods that were placed after oldest have ended. The card with the latest time
// is the first.
func (c *awaitedChoice) freeable(n *node, demand *gpu.Demand) (out []freeableCard) {
	if n.accepts(demand) != reasons.Fits {
		return nil
	}
	cards := c.besideReservations(n)
	if !slices.ContainsFunc(cards, func(card placement.Card) bool { return card.Fits(demand) }) {
		return nil
	}
	since := make([]time.Time, len(cards))
	for i := range cards {
		if since[i] = c.oldest; cards[i].Fits(demand) {
			since[i] = never
		}
	}
	for _, a := range n.byAge() {
		for _, share := range a.Placement {
			i, ok := position(cards, share.Card)
			if !ok || since[i] != never {
				continue
			}
			if cards[i].Add(share); !cards[i].Fits(demand) {
				since[i] = a.begun()
			}
		}
	}
	for i := range cards {
		if since[i].After(c.oldest) {
			out = append(out, freeableCard{cards[i].Index, since[i]})
		}
	}
	slices.SortStableFunc(out, func(a, b freeableCard) int { return b.since.Compare(a.since) })
	return out
}

// never is later than any time at which a pod was placed.
var never = time.Unix(1<<33, 0)

// besideReservations returns the cards without allocations, but with the item's own shares, and with those of items that come before
// if beside is true.
func (c *awaitedChoice) besideReservations(n *node) []placement.Card {
	cards := n.emptyCards()
	for i := range n.reserved {
		if r := &n.reserved[i]; r.Reservation == c.made || c.beside && r.Source == Queued && r.Item.Before(&c.made.Item) && c.stillCounts(r) {
			add(cards, r.On)
		}
	}
	return cards
}

// begun returns when the pod was placed; a zero time if that is unknown. A pod that isn't bound yet counts as new.
func (a *Allocation) begun() time.Time {
	if a.State == Assumed {
		return never.Add(-time.Second)
	}
	return a.AssumeTime
}

// byAge returns the allocations, the oldest first. The result is valid until the node changes. The caller holds the lock for writing.
func (n *node) byAge() []*Allocation {
	if n.aged.revision == n.revision && len(n.aged.allocations) == len(n.allocations) {
		return n.aged.allocations
	}
	out := n.aged.allocations[:0]
	for _, a := range n.allocations {
		out = append(out, a)
	}
	slices.SortFunc(out, func(a, b *Allocation) int { return cmp.Or(a.begun().Compare(b.begun()), cmp.Compare(a.UID, b.UID)) })
	n.aged = agedAllocations{n.revision, out}
	return out
}

// agedAllocations are the allocations of a node, the oldest first, as they were at a revision.
type agedAllocations struct {
	revision    uint64
	allocations []*Allocation
}

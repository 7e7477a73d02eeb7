package ledger

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// ReserveAwaited makes the awaited reservation of an item: places of cards for all requests. The cards may still be in use, and become available when
// pods end. It replaces an earlier reservation of the item.
//
// It takes the cards on which all requests fit if the youngest pods have ended: those that were placed after a time that is as late as possible,
// and later than oldest. Run times are unknown, and a pod that has run for long will likely run for long. The awaited reservations of items that come
// before count as pods that stay, and so do places that the item has to leave to nominated pods, or to those for which reclaim frees memory.
//
// The nodes must also have enough CPU, memory and other resources if the pods that were placed after oldest have ended.
//
// If the requests fit at once, the memory of the reservation counts as freed: it can have been reserved until now for an item that comes later in the
// queue.
//
// If the requests don't fit, there is no reservation for the item, and ReserveAwaited returns false. The nodes are compared one by one, with the lock held for
// each; they can change before the cards are chosen, so ReserveAwaited can return false although there are cards.
func (l *Ledger) ReserveAwaited(item Item, requests []Request, oldest time.Time) (made bool) {
	c := awaitedChoice{Ledger: l, item: item, oldest: oldest, pods: map[gpu.PodUID]bool{}, known: map[gpu.Demand]map[string]float64{}}
	for i := range requests {
		c.pods[requests[i].Pod.UID] = true
	}
	requests = c.shortlist(requests)
	l.edit(func(e *edit) {
		e.freed = l.endItem(Queued, item.ID)
		made = c.choose(requests)
		if !made {
			l.endItem(Queued, item.ID) // No pod has seen the reservation.
		}
		if made && l.awaitedFree(c.made) {
			for _, place := range c.made.Places {
				e.freed = append(e.freed, place.Node)
			}
		}
	})
	return made
}

// AwaitedUsable reports whether the item's awaited reservation is for these requests, as they are now, and for the item's rank, the nodes still take
// its pods, and its cards exist, are healthy, and would have room if they were empty. It returns false if there is no reservation.
func (l *Ledger) AwaitedUsable(item Item, requests []Request) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := l.reservations.items[Queued][item.ID]
	if r == nil || r.Item != item {
		return false
	}
	places := map[gpu.PodUID]*Place{}
	for i := range r.Places {
		if uid := r.Places[i].Pod.UID; !l.allocated(uid) {
			places[uid] = &r.Places[i]
		}
	}
	for i := range requests {
		pod := &requests[i].Pod
		if l.allocated(pod.UID) {
			continue
		}
		if place := places[pod.UID]; place == nil || place.Pod.Demand() != pod.Demand() || !l.nodes[place.Node].takes(place) {
			return false
		}
		delete(places, pod.UID)
	}
	return len(places) == 0 // Otherwise a pod isn't one of the item any more.
}

// takes reports whether the node takes the pod of the place, on cards that can be used and are large enough. n may be nil.
func (n *node) takes(place *Place) bool {
	demand := place.Pod.Demand()
	return n.canUse(place.On, &demand, func(card *placement.Card, on gpu.Share) bool { return card.Memory >= on.Memory })
}

// AwaitedFree reports whether all that the item's awaited reservation has is free, with the CPU and the other resources that its pods need, and no
// other reservation keeps it from the item.
func (l *Ledger) AwaitedFree(id string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.awaitedFree(l.reservations.items[Queued][id])
}

// awaitedFree is AwaitedFree for a reservation, which may be nil. It returns false if all its pods have allocations.
func (l *Ledger) awaitedFree(r *Reservation) bool {
	byNode := map[string][]Place{}
	for i := 0; r != nil && i < len(r.Places); i++ {
		if place := r.Places[i]; !l.allocated(place.Pod.UID) {
			byNode[place.Node] = append(byNode[place.Node], place)
		}
	}
	for name, places := range byNode {
		if n := l.nodes[name]; n == nil || !l.isFree(n, places) {
			return false
		}
	}
	return len(byNode) > 0
}

// isFree reports whether the places of one item are free on the node, with the resources that their pods need.
func (l *Ledger) isFree(n *node, places []Place) bool {
	pods := make([]gpu.Pod, len(places))
	for i := range places {
		pods[i] = places[i].Pod
	}
	a, q := l.askTogether(n, pods, nil)
	q.Ending = nil
	cards := slices.Clone(l.cardsFor(n, &a))
	for i := range places {
		if !hasRoom(cards, places[i].On) {
			return false
		}
		placement.Use(cards, places[i].On)
	}
	return l.resources.Fits(q)
}

// HasAwaited reports whether the item of this ID has an awaited reservation.
func (l *Ledger) HasAwaited(id string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.reservations.items[Queued][id] != nil
}

// AwaitedItems returns the IDs of the items that have awaited reservations, in no order.
func (l *Ledger) AwaitedItems() []string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return slices.Collect(maps.Keys(l.reservations.items[Queued]))
}

// AwaitedMemory returns what an item's awaited reservation has on each node; nil if there is none. A pod that needs a larger part of the node's CPU
// or another resource than of its memory counts with that part of the memory.
func (l *Ledger) AwaitedMemory(id string) map[string]gpu.Memory {
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := l.reservations.items[Queued][id]
	if r == nil {
		return nil
	}
	out, pods := map[string]gpu.Memory{}, map[string][]gpu.PodUID{}
	for _, place := range r.Places {
		out[place.Node] = out[place.Node].Add(place.On.Total())
		pods[place.Node] = append(pods[place.Node], place.Pod.UID)
	}
	for name, uids := range pods {
		if n := l.nodes[name]; n != nil {
			out[name] = max(out[name], gpu.Memory(l.resources.LargestPart(name, uids)*float64(n.memory())))
		}
	}
	return out
}

// ReservedFor returns the label of the item that comes first, of those whose awaited reservations the pod sees as used on the nodes. It is empty if
// there is none.
func (l *Ledger) ReservedFor(pod gpu.Pod, nodes []string) string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	a := l.asker(&pod, nil)
	var first *Reservation
	for _, name := range nodes {
		n := l.nodes[name]
		if n == nil {
			continue
		}
		for r := range l.placesAgainst(n, &a) {
			if r.Source == Queued && (first == nil || r.Item.Before(&first.Item)) {
				first = r.Reservation
			}
		}
	}
	if first == nil {
		return ""
	}
	return first.Item.Label
}

// AwaitedIdle returns the part of the memory of all shared cards that each item's awaited reservation keeps from other pods now, by the item's ID:
// what is free on its cards. Each part is between 0 and 1, and so is their sum.
func (l *Ledger) AwaitedIdle() map[string]float64 {
	l.mu.RLock()
	defer l.mu.RUnlock()
	idle, all := map[string]float64{}, 0.0 // In bytes: nodes can have different units.
	for _, n := range l.nodes {
		if n.shareable() == reasons.Fits {
			all += float64(n.unit().Bytes(n.memory()))
			l.addIdle(n, idle)
		}
	}
	for id := range idle {
		idle[id] /= all
	}
	return idle
}

// addIdle adds what is free on the node's cards of the places of awaited reservations from the queue, in bytes, by the item's ID.
func (l *Ledger) addIdle(n *node, idle map[string]float64) {
	if len(n.reserved) == 0 {
		return
	}
	cards := slices.Clone(n.cards)
	for i := range n.reserved {
		r := &n.reserved[i]
		if r.Source != Queued || l.allocated(r.Pod.UID) {
			continue
		}
		for _, share := range r.On {
			if at, ok := placement.Position(cards, share.Card); ok {
				free := min(share.Memory, cards[at].Free())
				cards[at].Used = cards[at].Used.Add(free)
				idle[r.Item.ID] += float64(n.unit().Bytes(free))
			}
		}
	}
}

// AwaitedNodes returns the nodes on which awaited reservations from the queue keep cards for pods.
func (l *Ledger) AwaitedNodes() map[gpu.PodUID]string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	nodes := map[gpu.PodUID]string{}
	for _, r := range l.reservations.items[Queued] {
		for i := range r.Places {
			nodes[r.Places[i].Pod.UID] = r.Places[i].Node
		}
	}
	return nodes
}

// awaitedChoice is one choice of cards, see ReserveAwaited.
type awaitedChoice struct {
	*Ledger
	item   Item
	made   *Reservation
	oldest time.Time
	// pods has the pods of the requests.
	pods map[gpu.PodUID]bool
	// known are the rates of nodes by demand and name, for the shortlist; 0 if the demand doesn't fit.
	known map[gpu.Demand]map[string]float64
	// The slices are kept for reuse by freeableCards.
	cards    []placement.Card
	freeable []freeableCard
	byAge    []*Allocation
}

// spareNodes is how many nodes a shortlist has beyond the number of pods.
const spareNodes = 16

// shortlist returns the requests with the best of their nodes: for each kind of request as many as there are requests, and some more. Each pod
// changes one node, so others are never better. Requests that shared a list of nodes share one again, and so a ranking: kinds that differ in CPU
// alone would otherwise be ranked one by one, with the lock held.
func (c *awaitedChoice) shortlist(requests []Request) []Request {
	type kind struct {
		list     listKey
		demand   gpu.Demand
		requests string
	}
	compared, best := map[kind]bool{}, map[listKey]map[string]bool{}
	for i := range requests {
		request := &requests[i]
		k := kind{keyOf(request.Nodes), request.Pod.Demand(), c.resources.Requests(request.Pod.UID)}
		if compared[k] {
			continue
		}
		compared[k] = true
		if best[k.list] == nil {
			best[k.list] = map[string]bool{}
		}
		for _, name := range c.best(request, len(requests)+spareNodes) {
			best[k.list][name] = true
		}
	}
	names, out := map[listKey][]string{}, slices.Clone(requests)
	for i := range out {
		list := keyOf(requests[i].Nodes)
		if names[list] == nil {
			names[list] = slices.DeleteFunc(slices.Clone(requests[i].Nodes), func(name string) bool { return !best[list][name] })
		}
		out[i].Nodes = names[list]
	}
	return out
}

// best returns the first n of the request's nodes that it fits and that will have the resources for it, the best first.
func (c *awaitedChoice) best(request *Request, n int) (best []string) {
	demand := request.Pod.Demand()
	rates := c.known[demand]
	if rates == nil {
		rates = map[string]float64{}
		c.known[demand] = rates
	}
	unknown := slices.DeleteFunc(slices.Clone(request.Nodes), func(name string) bool {
		_, known := rates[name]
		return known
	})
	c.eachNode(unknown, func(n *node) { rates[n.name], _ = c.secondsAfterOldest(n, &asker{demand: demand}, noKind) })
	names := slices.DeleteFunc(slices.Clone(request.Nodes), func(name string) bool { return rates[name] == 0 })
	slices.SortStableFunc(names, func(x, y string) int { return cmp.Compare(rates[y], rates[x]) })
	for i := 0; i < len(names) && len(best) < n; i++ {
		c.eachNode(names[i:i+1], func(n *node) {
			if c.willHaveResources(n, request.Pod.UID) {
				best = append(best, n.name)
			}
		})
	}
	return best
}

// willHaveResources reports whether the node will have the resources for the pod beside the item's own places, those of items that come before, and
// the places that the item has to leave to others: once the pods that were placed after oldest have ended.
func (c *awaitedChoice) willHaveResources(n *node, uid gpu.PodUID) bool {
	q := ResourceQuery{Node: n.name, Pods: []gpu.PodUID{uid}, Listed: true}
	for i := range n.reserved {
		if r := &n.reserved[i]; c.isAhead(r) || c.mustYield(r) {
			q.Ahead = append(q.Ahead, r.Pod.UID)
		}
	}
	q.Ahead = distinct(q.Ahead)
	if c.resources.Fits(q) {
		return true // Also if no pod ends.
	}
	for uid, a := range n.allocations {
		if a.begun().After(c.oldest) {
			q.Ending = append(q.Ending, uid)
		}
	}
	return len(q.Ending) > 0 && c.resources.Fits(q)
}

// secondsAfterOldest returns the latest time after which all pods must have ended for the pod to fit the node, in seconds after oldest. The caller
// holds the lock, at least for reading.
func (c *awaitedChoice) secondsAfterOldest(n *node, a *asker, _ int) (float64, bool) {
	cards := c.freeableCards(n, &a.demand)
	if len(cards) < a.demand.Cards {
		return 0, false
	}
	return cards[a.demand.Cards-1].since.Sub(c.oldest).Seconds(), true
}

// choose adds the reservation with its places. It returns false if one of the requests doesn't fit. The caller holds the lock.
func (c *awaitedChoice) choose(requests []Request) bool {
	c.made = c.addReservation(c.item.ID, Reservation{Source: Queued, Item: c.item, Priority: c.item.Priority})
	ranks := rankings{ledger: c.Ledger, rate: c.secondsAfterOldest, placeOn: c.placeOn}
	for i := range requests {
		if c.allocated(requests[i].Pod.UID) {
			continue
		}
		if _, ok := ranks.of(&requests[i]).place(requests[i].Pod); !ok {
			return false
		}
	}
	return true
}

// placeOn adds a place for the pod on the node.
func (c *awaitedChoice) placeOn(n *node, pod gpu.Pod) bool {
	if !c.willHaveResources(n, pod.UID) {
		return false
	}
	demand, place := pod.Demand(), Place{Pod: pod, Node: n.name}
	for _, card := range c.freeableCards(n, &demand)[:demand.Cards] {
		place.On = append(place.On, demand.On(card.index)...)
		for _, a := range c.byAge {
			if !a.begun().Before(card.since) && slices.Contains(a.Placement.Cards(), card.index) && !slices.Contains(place.Ending, a.UID) {
				place.Ending = append(place.Ending, a.UID)
			}
		}
	}
	c.addPlace(c.made, place)
	return true
}

// freeableCard is a card on which a demand fits if the pods that were placed there at a time, or later, have ended.
type freeableCard struct {
	index int
	since time.Time
}

// freeableCards returns the cards of a node on which the demand fits if the pods that were placed after oldest have ended. The card with the latest
// time is the first. The result is valid until the next call.
//
// It adds the pods to the empty cards, the oldest first. With the pod that leaves too little of a card, the pods have to end there.
func (c *awaitedChoice) freeableCards(n *node, demand *gpu.Demand) []freeableCard {
	if n.accepts(demand) != reasons.Fits {
		return nil
	}
	c.countReservations(n)
	usable := 0
	c.freeable = c.freeable[:0]
	for i := range c.cards {
		card := freeableCard{c.cards[i].Index, c.oldest}
		if c.cards[i].Fits(demand) {
			card.since = noEnd
			usable++
		}
		c.freeable = append(c.freeable, card)
	}
	if usable < demand.Cards {
		return nil
	}
	c.sortByAge(n)
	for _, a := range c.byAge {
		for _, share := range a.Placement {
			i, ok := placement.Position(c.cards, share.Card)
			if !ok || c.freeable[i].since != noEnd {
				continue
			}
			if c.cards[i].Add(share); !c.cards[i].Fits(demand) {
				c.freeable[i].since = a.begun()
			}
		}
	}
	c.freeable = slices.DeleteFunc(c.freeable, func(card freeableCard) bool { return !card.since.After(c.oldest) })
	slices.SortStableFunc(c.freeable, func(a, b freeableCard) int { return b.since.Compare(a.since) })
	return c.freeable
}

// mustYield reports whether the place is one that the item has to leave to another pod: one for which kube-scheduler or reclaim frees memory.
func (c *awaitedChoice) mustYield(r *reservedPlace) bool {
	return r.Source != Queued && c.item.Priority <= r.Priority && !c.pods[r.Pod.UID] && !c.allocated(r.Pod.UID)
}

// noEnd is the time of a card on which no pod has to end: later than any time at which a pod was placed. notYetBound is that of a pod that isn't bound
// yet.
var (
	noEnd       = time.Unix(1<<33, 0)
	notYetBound = noEnd.Add(-time.Second)
)

// countReservations sets cards to those of the node without allocations, but with the item's own places, with those of items that come before, and
// with those that the item has to leave to others.
func (c *awaitedChoice) countReservations(n *node) {
	var present []placement.Card
	c.cards = c.cards[:0]
	for i := range n.cards {
		c.cards = append(c.cards, n.cards[i].Empty())
	}
	for i := range n.reserved {
		switch r := &n.reserved[i]; {
		case c.isAhead(r):
			placement.Use(c.cards, r.On)
		case c.mustYield(r):
			if present == nil {
				present = slices.Clone(n.cards)
			}
			where := n.expected(r, present)
			placement.Use(present, where)
			placement.Use(c.cards, where)
		}
	}
}

// isAhead reports whether the place is the item's own, or that of an item that comes before.
func (c *awaitedChoice) isAhead(r *reservedPlace) bool {
	before := r.Source == Queued && r.Item.ID != c.item.ID && r.Item.Before(&c.item) && !c.allocated(r.Pod.UID)
	return before || c.made != nil && r.Reservation == c.made
}

// begun returns when the pod was placed; a zero time if that is unknown. A pod that isn't bound yet counts as new.
func (a *Allocation) begun() time.Time {
	if a.State == Assumed {
		return notYetBound
	}
	return a.AssumeTime
}

// sortByAge sets byAge to the node's allocations, the oldest first.
func (c *awaitedChoice) sortByAge(n *node) {
	c.byAge = c.byAge[:0]
	for _, a := range n.allocations {
		c.byAge = append(c.byAge, a)
	}
	slices.SortFunc(c.byAge, func(a, b *Allocation) int {
		if order := a.begun().Compare(b.begun()); order != 0 {
			return order
		}
		return cmp.Compare(a.UID, b.UID)
	})
}

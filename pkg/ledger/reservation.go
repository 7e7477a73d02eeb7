package ledger

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Reservation keeps memory for an item that isn't bound: a pod, or several pods that get their places together. The item's pods see the memory as
// free. The ledger keeps copies.
type Reservation struct {
	Source Source
	// Item is the item of the queue, for reservations from the queue. For a Kept one, it has the ID only.
	Item Item
	// Priority is the highest priority of the other pods that see the memory of an awaited reservation as used. All pods see a placed one. Between
	// an item and a pod of which one needs a turn of fair sharing, priorities don't count, see comesBefore.
	Priority int32
	// Places are what an awaited reservation keeps. A place counts until its pod has an allocation.
	Places []Place
	// Victims are pods that are about to be evicted for the item. For a place that names no cards they count as terminating already.
	Victims []gpu.PodUID
	// Binding is true from the begin of a bind of the pod of a placed reservation until its outcome is known: nothing but this outcome moves or
	// releases the allocation. The pod can have no allocation yet.
	Binding bool
}

// Place is what a reservation keeps for one of its pods.
type Place struct {
	Pod  gpu.Pod
	Node string
	// On are the cards, which may still be in use. If it is empty, the cards are those that the pod is likely to get, see node.expected.
	On gpu.Placement
	// Ending are the pods that have to end on the cards of an awaited reservation from the queue. What they use of the node besides is free for its
	// pod then.
	Ending []gpu.PodUID
}

// Source is what makes and ends a reservation. A pod has at most one awaited reservation from each source, and one that is placed or binding.
type Source uint8

// The sources of placed reservations. Reserve, ReserveAll and Move place pods, and SetSource and ResetSource set the source.
const (
	Direct  Source = iota // A choice of cards by a bind. ResetSource returns to it.
	Planned               // The plan of a gang.
	Granted               // A turn by fair sharing.
	// The sources of awaited reservations. End ends them.

	Nominated // A nomination by kube-scheduler, or the place of another preemptor. Nominate makes it, with Victims.
	Reclaimed // Reclaim, which frees memory for an item. AddReservation makes it, with Victims.
	Queued    // The queue, for an item that waits for memory. ReserveAwaited makes it, with Item.
	Kept      // Memory of a pod that has ended, for the next pod of its tenant, which doesn't see it as used: View.Ignored. AddReservation makes it.
	sources
)

// reservations is the store of all reservations. The ledger's lock guards it.
type reservations struct {
	// awaited are the awaited reservations by source and pod.
	awaited [sources]map[gpu.PodUID]*Reservation
	// items are the awaited reservations by source and the item's ID. The item of a nomination is its pod, whose UID is the ID.
	items [sources]map[string]*Reservation
	// placed are the placed and binding reservations. Their memory is in the pods' allocations.
	placed map[gpu.PodUID]*Reservation
}

func newReservations() (r reservations) {
	for source := range r.awaited {
		r.awaited[source], r.items[source] = map[gpu.PodUID]*Reservation{}, map[string]*Reservation{}
	}
	r.placed = map[gpu.PodUID]*Reservation{}
	return r
}

// ownReservations are the awaited reservations of one pod by source; nil if there is none.
type ownReservations [sources]*Reservation

// of returns the awaited reservations of the pod.
func (r *reservations) of(uid gpu.PodUID) (own ownReservations) {
	for source := range own {
		own[source] = r.awaited[source][uid]
	}
	return own
}

// reservedPlace is a place with its reservation.
type reservedPlace struct {
	*Reservation
	Place
}

// compare orders the places of a node. Those on certain cards come first. The others are in the order in which their pods get cards: by priority,
// and then by request, the largest first, because fewer cards have room for it.
func (r reservedPlace) compare(o reservedPlace) int {
	if known, others := len(r.On) > 0, len(o.On) > 0; known || others {
		return cmp.Compare(len(o.On), len(r.On))
	}
	return cmp.Or(cmp.Compare(o.Priority, r.Priority), cmp.Compare(o.Pod.Request, r.Pod.Request), cmp.Compare(r.Pod.UID, o.Pod.UID))
}

// AddReservation makes the awaited reservation of an item. The item must have none from this source.
func (l *Ledger) AddReservation(id string, r Reservation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.addReservation(id, r)
}

// End ends the awaited reservation that the source has made for an item, if there is one. The ID of a nomination is its pod's UID.
func (l *Ledger) End(source Source, id string) {
	l.edit(func(e *edit) { e.freed = l.endItem(source, id) })
}

// addReservation is AddReservation with the lock held. It returns what it added.
func (l *Ledger) addReservation(id string, r Reservation) *Reservation {
	places := r.Places
	r.Places, r.Victims = make([]Place, 0, len(places)), slices.Clone(r.Victims)
	l.reservations.items[r.Source][id] = &r
	for _, place := range places {
		l.addPlace(&r, place)
	}
	return &r
}

// addPlace adds a place to a reservation in the store.
func (l *Ledger) addPlace(r *Reservation, place Place) {
	r.Places = append(r.Places, place)
	l.reservations.awaited[r.Source][place.Pod.UID] = r
	if n := l.nodes[place.Node]; n != nil {
		n.addReserved(r, place)
		l.markChanged(n)
	}
}

func (n *node) addReserved(r *Reservation, place Place) {
	added := reservedPlace{r, place}
	i, _ := slices.BinarySearchFunc(n.reserved, added, func(s, _ reservedPlace) int { return cmp.Or(s.compare(added), -1) }) // After equal ones.
	n.reserved = slices.Insert(n.reserved, i, added)
}

// endItem is End with the lock held. It returns the nodes of the places that counted until now.
func (l *Ledger) endItem(source Source, id string) (freed []string) {
	r := l.reservations.items[source][id]
	if r == nil {
		return nil
	}
	own, last := l.reservations.awaited[source], ""
	for _, place := range r.Places {
		uid := place.Pod.UID
		if own[uid] == r {
			delete(own, uid)
		}
		if !l.allocated(uid) {
			freed = append(freed, place.Node)
		}
		if place.Node == last { // Mostly the places on one node follow one another.
			continue
		}
		last = place.Node
		if n := l.nodes[last]; n != nil {
			n.reserved = slices.DeleteFunc(n.reserved, func(s reservedPlace) bool { return s.Reservation == r })
			l.markChanged(n)
		}
	}
	delete(l.reservations.items[source], id)
	return freed
}

// nodesReservedFor returns the nodes on which places don't count any more once the pod has an allocation.
func (l *Ledger) nodesReservedFor(uid gpu.PodUID) (names []string) {
	for _, r := range l.reservations.of(uid) {
		for i := 0; r != nil && i < len(r.Places); i++ {
			if r.Places[i].Pod.UID == uid {
				names = append(names, r.Places[i].Node)
			}
		}
	}
	return names
}

// HasReservation reports whether something is reserved for the pod, or allocated to it. Each other pod sees at most as much free memory as any pod that
// has its priority, and that needs a turn of fair sharing if it does.
func (l *Ledger) HasReservation(uid gpu.PodUID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.allocated(uid) || l.reservations.of(uid) != ownReservations{}
}

// Turns knows which pods need a turn of fair sharing. It is called with the ledger's lock held, so it must not call the ledger.
type Turns interface {
	NeedsTurn(pod gpu.Pod) bool
}

// NeedsTurn reports whether the pod needs a turn of fair sharing.
func (l *Ledger) NeedsTurn(pod gpu.Pod) bool { return l.turns != nil && l.turns.NeedsTurn(pod) }

// expected returns the cards of a place. If it names none, these are the cards that the pod is likely to get: cards with room, or if there are
// none, cards that have room once the terminating pods and the victims have ended. The result can be empty, because the victims that
// kube-scheduler chose are unknown until they are terminating.
func (n *node) expected(r *reservedPlace, cards []placement.Card) gpu.Placement {
	if len(r.On) > 0 {
		return r.On
	}
	demand := r.Pod.Demand()
	if n.accepts(&demand) != reasons.Fits {
		return nil // The node has changed since.
	}
	where, reason := placement.Place(placement.Expected, cards, demand)
	if !reason.Resolvable() {
		return where
	}
	cards = slices.Clone(cards)
	for _, a := range n.allocations {
		if a.Leaving || slices.Contains(r.Victims, a.UID) {
			placement.Release(cards, a.Placement)
		}
	}
	where, _ = placement.Place(placement.Expected, cards, demand)
	return where
}

// nominees returns the places that name no cards.
func (n *node) nominees() []reservedPlace {
	i := slices.IndexFunc(n.reserved, func(r reservedPlace) bool { return len(r.On) == 0 })
	if i < 0 {
		return nil
	}
	return n.reserved[i:]
}

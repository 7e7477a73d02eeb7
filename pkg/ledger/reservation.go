package ledger

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Reservation keeps memory for an item: a pod, or several pods that get their places together. The item's pods see the memory as free. The
// ledger keeps copies.
type Reservation struct {
	Source Source
	// Label names the item for users. A pod that only labelled reservations keep from a node doesn't fit it with the reason reasons.Reserved.
	Label string
	// Priority is the highest priority of the other pods that see the memory as used.
	Priority int32
	// Shares are what is kept. A share counts until its pod has an allocation, or until the reservation ends if Lasting is true.
	Shares  []Share
	Lasting bool
	// Victims are pods that are about to be evicted for the item: where a share names no cards, their memory counts as if they were terminating
	// already.
	Victims []gpu.PodUID
}

// Share is what a reservation keeps for one of its pods.
type Share struct {
	Pod  gpu.Pod
	Node string
	// On are the cards, which may still be in use. If it is empty, the cards are those that the pod is likely to get, see node.expected.
	On gpu.Placement
}

// Source is what makes and ends a reservation. A pod has at most one reservation from each source.
type Source uint8

const (
	// Nominated is a nomination by kube-scheduler, or to a node where a round of evictions frees cards for the pod.
	Nominated Source = iota
	// Reclaimed is what reclaim frees for a unit.
	Reclaimed
	// Starving is for the run of a gang that has waited too long.
	Starving

	sources
)

// reservations is the store of all reservations. The ledger's lock guards it.
type reservations struct {
	bySource [sources]map[*Reservation]struct{}
	// byPod are the reservations of each pod by source.
	byPod map[gpu.PodUID]ownReservations
	// byNode are the shares on each node, also on those that the ledger doesn't know. See node.reserved.
	byNode map[string][]reserved
}

func newReservations() (r reservations) {
	for source := range r.bySource {
		r.bySource[source] = map[*Reservation]struct{}{}
	}
	r.byPod, r.byNode = map[gpu.PodUID]ownReservations{}, map[string][]reserved{}
	return r
}

// ownReservations are the reservations of one pod by source; nil if there is none.
type ownReservations [sources]*Reservation

// reserved is a share with its reservation.
type reserved struct {
	*Reservation
	Share
}

// compare orders the shares of a node. Those on certain cards come first. The others are in the order in which their pods get cards: by priority,
// and then by request, the largest first, because fewer cards have room for it.
func (r reserved) compare(o reserved) int {
	if known, others := len(r.On) > 0, len(o.On) > 0; known || others {
		return cmp.Compare(len(o.On), len(r.On))
	}
	return cmp.Or(cmp.Compare(o.Priority, r.Priority), cmp.Compare(o.Pod.Request, r.Pod.Request), cmp.Compare(r.Pod.UID, o.Pod.UID))
}

func (r *Reservation) equal(o Reservation) bool {
	return r.Source == o.Source && r.Label == o.Label && r.Priority == o.Priority && r.Lasting == o.Lasting && slices.Equal(r.Victims, o.Victims) &&
		slices.EqualFunc(r.Shares, o.Shares, func(a, b Share) bool { return a.Pod == b.Pod && a.Node == b.Node && a.On.Equal(b.On) })
}

// SetReservations replaces the reservations of the source.
func (l *Ledger) SetReservations(source Source, next ...Reservation) {
	l.mu.Lock()
	freed := l.replaceAll(source, next)
	l.mu.Unlock()
	l.freed(freed...) // Other pods can use memory that isn't reserved any more.
}

func (l *Ledger) replaceAll(source Source, next []Reservation) (freed []string) {
	return l.replace(slices.Collect(maps.Keys(l.reservations.bySource[source])), next)
}

// replace ends the former reservations and adds the next ones. Those that are equal stay. It returns the nodes on which shares don't count any more.
func (l *Ledger) replace(former []*Reservation, next []Reservation) (freed []string) {
	next = slices.Clone(next)
	for _, r := range former {
		if i := slices.IndexFunc(next, r.equal); i >= 0 {
			next = slices.Delete(next, i, i+1)
		} else {
			freed = append(freed, l.endReservation(r)...)
		}
	}
	for _, r := range next {
		l.addReservation(r)
	}
	slices.Sort(freed)
	return slices.Compact(freed)
}

// addReservation adds a reservation with its shares.
func (l *Ledger) addReservation(r Reservation) *Reservation {
	shares := r.Shares
	r.Shares, r.Victims = make([]Share, 0, len(shares)), slices.Clone(r.Victims)
	l.reservations.bySource[r.Source][&r] = struct{}{}
	for _, share := range shares {
		l.addShare(&r, share)
	}
	return &r
}

// addShare adds a share to a reservation in the store.
func (l *Ledger) addShare(r *Reservation, share Share) {
	r.Shares = append(r.Shares, share)
	own := l.reservations.byPod[share.Pod.UID]
	own[r.Source] = r
	l.reservations.byPod[share.Pod.UID] = own
	added := reserved{r, share}
	on := l.reservations.byNode[share.Node]
	i, _ := slices.BinarySearchFunc(on, added, reserved.compare)
	l.setReserved(share.Node, slices.Insert(on, i, added))
}

// endReservation removes a reservation. It returns the nodes of the shares that counted until now.
func (l *Ledger) endReservation(r *Reservation) (freed []string) {
	delete(l.reservations.bySource[r.Source], r)
	for _, share := range r.Shares {
		if own := l.reservations.byPod[share.Pod.UID]; own[r.Source] == r {
			if own[r.Source] = nil; own == (ownReservations{}) {
				delete(l.reservations.byPod, share.Pod.UID)
			} else {
				l.reservations.byPod[share.Pod.UID] = own
			}
		}
		if _, allocated := l.nodeOf[share.Pod.UID]; r.Lasting || !allocated {
			freed = append(freed, share.Node)
		}
	}
	for _, name := range r.nodes() {
		l.setReserved(name, slices.DeleteFunc(l.reservations.byNode[name], func(s reserved) bool { return s.Reservation == r }))
	}
	return freed
}

// setReserved sets the shares on a node.
func (l *Ledger) setReserved(name string, shares []reserved) {
	if l.reservations.byNode[name] = shares; len(shares) == 0 {
		delete(l.reservations.byNode, name)
	}
	if n := l.nodes[name]; n != nil {
		n.reserved = shares
		l.markChanged(n)
	}
}

// nodes returns the names of the nodes with shares, sorted.
func (r *Reservation) nodes() []string {
	names := make([]string, len(r.Shares))
	for i := range r.Shares {
		names[i] = r.Shares[i].Node
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// reservedFor returns the nodes on which shares don't count any more once the pod has an allocation.
func (l *Ledger) reservedFor(uid gpu.PodUID) (names []string) {
	for _, r := range l.reservations.byPod[uid] {
		if r == nil || r.Lasting {
			continue
		}
		for i := range r.Shares {
			if r.Shares[i].Pod.UID == uid {
				names = append(names, r.Shares[i].Node)
			}
		}
	}
	return names
}

// OwnPlaces returns the nodes on which one of the pods has something of its own: an allocation, or a share of its reservations. On other nodes
// each of them sees the same memory as any pod of its priority.
func (l *Ledger) OwnPlaces(pods []gpu.Pod) map[string]bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	nodes, seen := map[string]bool{}, map[*Reservation]bool{}
	for i := range pods {
		if home, allocated := l.nodeOf[pods[i].UID]; allocated {
			nodes[home] = true
		}
		for _, r := range l.reservations.byPod[pods[i].UID] {
			if r == nil || seen[r] {
				continue
			}
			seen[r] = true
			for _, share := range r.Shares {
				nodes[share.Node] = true
			}
		}
	}
	return nodes
}

// cardsFor returns the node's cards as the pod sees them: a copy if reservations count for the pod. If labelled is false, those with a label
// don't. The caller holds the lock, and the node is open.
func (l *Ledger) cardsFor(n *node, pod *gpu.Pod, labelled bool) []placement.Card {
	if len(n.reserved) == 0 {
		return n.cards
	}
	cards, copied, own := n.cards, false, l.reservations.byPod[pod.UID]
	for i := range n.reserved {
		r := &n.reserved[i]
		if pod.Priority > r.Priority || own[r.Source] == r.Reservation || !labelled && r.Label != "" || !l.stillCounts(r) {
			continue
		}
		if !copied {
			cards, copied = slices.Clone(cards), true
		}
		add(cards, n.placementOf(r, cards))
	}
	return cards
}

// stillCounts reports whether the share counts: its pod has no allocation, or the reservation is lasting.
func (l *Ledger) stillCounts(r *reserved) bool {
	_, allocated := l.nodeOf[r.Pod.UID]
	return r.Lasting || !allocated
}

// orReserved returns reasons.Reserved instead of the reason if the pod would fit the node without the labelled reservations.
func (l *Ledger) orReserved(n *node, pod *gpu.Pod, reason reasons.Reason) reasons.Reason {
	named := func(r reserved) bool { return r.Label != "" }
	if reason.Resolvable() && slices.ContainsFunc(n.reserved, named) && placement.Fit(l.cardsFor(n, pod, false), pod.Demand()) == reasons.Fits {
		return reasons.Reserved
	}
	return reason
}

// placementOf returns the cards of the share.
func (n *node) placementOf(r *reserved, cards []placement.Card) gpu.Placement {
	if len(r.On) > 0 {
		return r.On
	}
	return n.expected(r, cards)
}

// expected returns the cards that a pod is likely to get whose share names none: cards with room, or if there are none, cards that have room
// once the terminating pods and the victims have ended. The result can be empty, because the victims that kube-scheduler chose are unknown until
// they are terminating.
func (n *node) expected(r *reserved, cards []placement.Card) gpu.Placement {
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
			subtract(cards, a.Placement)
		}
	}
	where, _ = placement.Place(placement.Expected, cards, demand)
	return where
}

// nominees returns the shares that name no cards.
func (n *node) nominees() []reserved {
	i := slices.IndexFunc(n.reserved, func(r reserved) bool { return len(r.On) == 0 })
	if i < 0 {
		return nil
	}
	return n.reserved[i:]
}

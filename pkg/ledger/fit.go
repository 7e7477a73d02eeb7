package ledger

import (
	"iter"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// This file decides whether a node has room for a pod, in three steps: the node takes such pods (node.accepts); its cards have room beside what is
// reserved against the pod (cardsFor); and so has the rest of the node (hasResources).
//
//   - fit takes all steps and returns the reason if the pod doesn't fit.
//   - chooseCards takes all steps and chooses cards.
//   - suitability takes the first two and rates the node, for rankings that pods with different CPU requests share. Rank takes the third step
//     itself, and other rankings leave it to chooseCards.
//
// Which cards have room is decided in package placement (Totals.Fit, Place). A card's used memory includes placed reservations, which are assumed
// allocations; only awaited ones are added in this file.

// asker is a pod without an allocation that asks what nodes have for it: a place is against it if it counts as used for it.
type asker struct {
	pod    *gpu.Pod
	demand gpu.Demand
	// own are its awaited reservations, whose memory it sees as free.
	own ownReservations
	// unseen is View.Unseen.
	unseen map[string]bool
}

// asker returns the pod as an asker. The caller holds the lock.
func (l *Ledger) asker(pod *gpu.Pod, unseen map[string]bool) asker {
	return asker{pod, pod.Demand(), l.reservations.of(pod.UID), unseen}
}

// ForEachFit calls visit for each of the named nodes, in order, with Fits or the reason why the pod doesn't fit the node. It
// changes nothing. visit runs under the lock and must not call the ledger.
func (l *Ledger) ForEachFit(pod gpu.Pod, names []string, visit func(name string, reason reasons.Reason)) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	home, allocated := l.nodeOf[pod.UID]
	a := l.asker(&pod, nil)
	for _, name := range names {
		switch {
		case !allocated:
			visit(name, l.fit(l.nodes[name], &a))
		case name == home:
			visit(name, reasons.Fits)
		default:
			visit(name, reasons.Elsewhere)
		}
	}
}

// AnyFit returns the node of the pod's allocation, or else the first node by name that the pod fits.
func (l *Ledger) AnyFit(pod gpu.Pod) (name string, ok bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if home, allocated := l.nodeOf[pod.UID]; allocated {
		return home, true
	}
	a := l.asker(&pod, nil)
	for other, n := range l.nodes { // Of those that it fits, the first by name, so that a simulation can be repeated.
		if (!ok || other < name) && l.fit(n, &a) == reasons.Fits {
			name, ok = other, true
		}
	}
	return name, ok
}

// FirstFit returns the first of the named nodes that the pod fits, also by what the node has free besides GPU memory. A pod with an allocation
// fits only its own node.
func (l *Ledger) FirstFit(pod gpu.Pod, names []string) (name string, ok bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if home, allocated := l.nodeOf[pod.UID]; allocated {
		return home, slices.Contains(names, home)
	}
	a := l.asker(&pod, nil)
	for _, name := range names {
		if l.fit(l.nodes[name], &a) == reasons.Fits && l.resourcesFit(ResourceQuery{Node: name, Pods: []gpu.PodUID{pod.UID}}) {
			return name, true
		}
	}
	return "", false
}

// FitsResources reports whether the pod fits the node beside what is reserved there for others once the pods in gone have ended, by all resources but
// GPU memory.
func (l *Ledger) FitsResources(name string, pod gpu.Pod, gone []gpu.PodUID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n, a := l.nodes[name], l.asker(&pod, nil)
	return n == nil || l.hasResourcesOnceGone(n, &a, gone)
}

// View determines how Rank, ReserveAll and Move rate nodes.
type View struct {
	// Card and Node are the policies by which a node's suitability is computed.
	Card, Node placement.Policy
	// TentativeAt is the present time if tentative placements of other pods count as allocated; zero if they don't.
	TentativeAt time.Time
	// Unseen are the IDs of items of the queue whose awaited reservations don't count: those that come after the pod.
	Unseen map[string]bool
}

// Rank is ForEachFit with each node's suitability; i is the position of the node in names. A node on which the pod has an
// allocation gets the best suitability. Rank reports whether it counted tentative placements.
func (l *Ledger) Rank(view View, pod gpu.Pod, names []string, visit func(i int, suits placement.Suitability, reason reasons.Reason)) (tentative bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	home, allocated := l.nodeOf[pod.UID]
	a, kind, exact := l.asker(&pod, view.Unseen), noKind, true
	if !allocated {
		kind, exact = l.kindOf(&view, &pod)
	}
	var later []rankedNode
	for i, name := range names {
		switch {
		case allocated && home == name:
			visit(i, placement.MaxScore, reasons.Fits)
		case allocated:
			visit(i, 0, reasons.Elsewhere)
		default:
			n := l.nodes[name]
			suits, reason := l.suitability(n, &view, &a, kind)
			if l.hasReserved(n) {
				reason = l.reasonBeside(n, &a, reason)
			}
			if exact {
				visit(i, suits, reason)
			} else {
				later = append(later, rankedNode{n, suits, reason})
			}
		}
	}
	l.refine(&view, &a, later)
	for i := range later {
		visit(i, later[i].suits, later[i].reason)
	}
	return l.tentative.anyCounts(view)
}

// chooseCards returns the cards of the node that the policy chooses for the pod, or the reason why the pod doesn't fit. n may be nil.
func (l *Ledger) chooseCards(n *node, a *asker, policy placement.Policy) (gpu.Placement, reasons.Reason) {
	if reason := n.accepts(&a.demand); reason != reasons.Fits {
		return nil, reason
	}
	where, reason := placement.Place(policy, l.cardsFor(n, a), a.demand)
	return where, l.reasonBeside(n, a, reason)
}

// fit returns Fits if the pod fits the node, else the reason why not. n may be nil.
func (l *Ledger) fit(n *node, a *asker) reasons.Reason {
	if reason := n.accepts(&a.demand); reason != reasons.Fits {
		return reason
	}
	if !l.hasReserved(n) { // Mostly, and then without a look at the cards.
		return n.totals.Fit(n.cards, &a.demand)
	}
	return l.reasonBeside(n, a, placement.Fit(l.cardsFor(n, a), a.demand))
}

// suitability returns how well the node suits the pod, or the reason why the node's cards have no room. kind is kindOf the pod.
func (l *Ledger) suitability(n *node, view *View, a *asker, kind int) (placement.Suitability, reasons.Reason) {
	if reason := n.accepts(&a.demand); reason != reasons.Fits {
		return 0, reason
	}
	beside := len(n.reserved) > 0 || len(n.tentative) > 0
	cards, totals := n.cards, &n.totals
	if beside {
		cards = l.cardsInView(n, view, a)
		sum := placement.Sum(cards)
		totals = &sum
	}
	if kind == noKind {
		return placement.Suit(&view.Card, &view.Node, cards, totals, &a.demand)
	}
	switch reason := totals.Fit(cards, &a.demand); {
	case reason != reasons.Fits:
		return 0, reason
	case beside:
		return placement.SuitsByCost(l.outlook.CostOf(n.nodeRoom(cards), kind)), reason
	default:
		return l.suitabilityByCost(n, kind), reason
	}
}

// cardsInView is cardsFor in a view: tentative placements can count too.
func (l *Ledger) cardsInView(n *node, view *View, a *asker) []placement.Card {
	cards := l.cardsFor(n, a)
	if !view.TentativeAt.IsZero() {
		cards = n.withTentative(cards, view, a.pod)
	}
	return cards
}

// cardsFor returns the node's cards as the pod sees them: what is reserved against it counts as used. The caller must not change them.
func (l *Ledger) cardsFor(n *node, a *asker) []placement.Card {
	return l.cardsBeside(n, a, func(*reservedPlace) bool { return true })
}

// cardsBeside is cardsFor with those of the places only that count.
func (l *Ledger) cardsBeside(n *node, a *asker, counts func(*reservedPlace) bool) []placement.Card {
	cards, copied := n.cards, false
	for r := range l.placesAgainst(n, a) {
		if !counts(r) {
			continue
		}
		if !copied {
			cards, copied = slices.Clone(cards), true
		}
		placement.Use(cards, n.expected(r, cards))
	}
	return cards
}

// placesAgainst yields the places of awaited reservations on the node that count as used for the pod.
func (l *Ledger) placesAgainst(n *node, a *asker) iter.Seq[*reservedPlace] {
	return func(yield func(*reservedPlace) bool) {
		for i := range n.reserved {
			r := &n.reserved[i]
			if l.isAgainst(a, r) && !yield(r) {
				return
			}
		}
	}
}

// isAgainst reports whether the place counts as used for the pod: it belongs to a reservation of others that comes before the pod, and its own pod
// has no allocation yet.
func (l *Ledger) isAgainst(a *asker, r *reservedPlace) bool {
	return a.own[r.Source] != r.Reservation && !a.unseen[r.Item.ID] && l.comesBefore(r, a) && !l.isBehind(a, r) && !l.allocated(r.Pod.UID)
}

// comesBefore reports whether the reservation comes before the pod. Two items of the queue have its order. If either the item or the pod needs a turn
// of fair sharing, the other one comes first. Otherwise priority decides, see Reservation.Priority.
func (l *Ledger) comesBefore(r *reservedPlace, a *asker) bool {
	mine := a.own[r.Source]
	switch {
	case r.Source == Queued && mine != nil:
		return r.Item.Before(&mine.Item)
	case r.Source == Queued && r.Item.ByTurn != l.NeedsTurn(*a.pod):
		return !r.Item.ByTurn
	}
	return a.pod.Priority <= r.Priority
}

// isBehind reports whether the place comes behind a place of the pod, or behind one of the unit for which reclaim frees memory.
func (l *Ledger) isBehind(a *asker, r *reservedPlace) bool {
	nomination, unit := a.own[Nominated], a.own[Reclaimed]
	nominated := nomination != nil && nomination.Places[0].Node == r.Node && slices.Contains(r.Behind, a.pod.UID)
	return nominated || unit != nil && slices.ContainsFunc(r.Behind, func(uid gpu.PodUID) bool { return l.reservations.awaited[Reclaimed][uid] == unit })
}

// reasonBeside returns the reason beside what is reserved for others on the node, which may be nil: reasons.ResourcesReserved instead of Fits if that
// leaves too little CPU, or another resource, for the pod, and reasons.Reserved if the cards would have room without the queue's reservations.
func (l *Ledger) reasonBeside(n *node, a *asker, reason reasons.Reason) reasons.Reason {
	switch {
	case reason == reasons.Fits && !l.hasResources(n, a):
		return reasons.ResourcesReserved
	case reason.Resolvable() && l.fitsWithoutQueued(n, a):
		return reasons.Reserved
	}
	return reason
}

// fitsWithoutQueued reports whether only the queue's reservations keep the pod from the node's cards.
func (l *Ledger) fitsWithoutQueued(n *node, a *asker) bool {
	queued := false
	cards := l.cardsBeside(n, a, func(r *reservedPlace) bool {
		queued = queued || r.Source == Queued
		return r.Source != Queued
	})
	return queued && placement.Fit(cards, a.demand) == reasons.Fits
}

// hasResources reports whether the node has CPU and all other resources for the pod beside what is reserved there for others. It returns true if
// nothing is: kube-scheduler has checked that the pod fits what is free. n may be nil.
func (l *Ledger) hasResources(n *node, a *asker) bool {
	return !l.hasReserved(n) || l.hasResourcesOnceGone(n, a, nil)
}

// hasResourcesOnceGone is FitsResources.
func (l *Ledger) hasResourcesOnceGone(n *node, a *asker, gone []gpu.PodUID) bool {
	ahead, ending := l.podsAhead(n, a)
	return len(ahead) == 0 ||
		l.resourcesFit(ResourceQuery{Node: n.name, Pods: []gpu.PodUID{a.pod.UID}, Ahead: ahead, Ending: distinct(append(ending, gone...))})
}

// podsAhead returns the pods that need a place on the node and that come before the pod, with the pods that have to end for them: those of awaited
// reservations from the queue and from reclaim, as far as the pod sees their cards as used, and those with assumed allocations. kube-scheduler counts
// nominated pods itself.
func (l *Ledger) podsAhead(n *node, a *asker) (ahead, ending []gpu.PodUID) {
	for r := range l.placesAgainst(n, a) {
		if r.Source != Nominated {
			ahead = append(ahead, r.Pod.UID)
			ending = append(append(ending, r.Ending...), r.Victims...)
		}
	}
	for uid, other := range n.allocations {
		if other.State == Assumed && uid != a.pod.UID && (other.Priority >= a.pod.Priority || l.isBinding(uid)) {
			ahead = append(ahead, uid)
		}
	}
	return distinct(ahead), distinct(ending) // Reclaim and the queue can both have a reservation for a pod.
}

func distinct(uids []gpu.PodUID) []gpu.PodUID {
	slices.Sort(uids)
	return slices.Compact(uids)
}

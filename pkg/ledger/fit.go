package ledger

import (
	"cmp"
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
//   - choosePlace takes one more after chooseCards: the node has the rest now (hasResourcesNow). It is for nodes that kube-scheduler has not offered.
//
// Which cards have room is decided in package placement (Fit, Place). A card's used memory includes placed reservations, which are assumed
// allocations; only awaited ones are added in this file.

// asker is a pod that asks what nodes have for it: a place is against it if it counts as used for it.
type asker struct {
	pod    *gpu.Pod
	demand gpu.Demand
	// home is the node of its allocation; empty if it has none.
	home string
	// own are its awaited reservations, whose memory it sees as free.
	own ownReservations
	// ignored is View.Ignored.
	ignored map[string]bool
}

// asker returns the pod as an asker. The caller holds the lock.
func (l *Ledger) asker(pod *gpu.Pod, ignored map[string]bool) asker {
	return asker{pod, pod.Demand(), l.nodeOf[pod.UID], l.reservations.of(pod.UID), ignored}
}

// FirstFit returns the first of the named nodes that the pod fits, also by what the node has free besides GPU memory. A pod with an allocation
// fits only its own node.
func (l *Ledger) FirstFit(pod gpu.Pod, names []string) (name string, ok bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	a := l.asker(&pod, nil)
	for _, name := range names {
		if l.fit(l.nodes[name], &a) == reasons.Fits && (a.home != "" || l.resources.Fits(ResourceQuery{Node: name, Pods: []gpu.PodUID{pod.UID}})) {
			return name, true
		}
	}
	return "", false
}

// FitsResources reports whether the pods of an item fit the node together, beside what is reserved there for others, once the pods in gone have ended:
// by all resources but GPU memory. The awaited reservations of the items in ignored, which can be nil, don't count.
func (l *Ledger) FitsResources(name string, pods []gpu.Pod, gone []gpu.PodUID, ignored map[string]bool) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.nodes[name]
	if n == nil {
		return true
	}
	_, q := l.askTogether(n, pods, ignored)
	q.Ending = distinct(append(q.Ending, gone...))
	return l.resources.Fits(q)
}

// View determines how Rank, ReserveAll and Move rate nodes.
type View struct {
	// Card and Node are the policies by which a node's suitability is computed.
	Card, Node placement.Policy
	// TentativeAt is the present time if tentative placements of other pods count as allocated; zero if they don't.
	TentativeAt time.Time
	// Ignored are the IDs of items whose awaited reservations don't count: of the queue, those that come after the pod, and what is kept for the pod's tenant.
	Ignored map[string]bool
}

// Rank returns those of the named nodes that the pod fits, in order, and for each of the named nodes Fits or the reason why the pod doesn't fit it. A
// node on which the pod has an allocation gets the best suitability. tentative is true if tentative placements counted.
func (l *Ledger) Rank(view View, pod gpu.Pod, names []string) (fitting []placement.Candidate, results []reasons.Reason, tentative bool) {
	fitting, results = make([]placement.Candidate, 0, len(names)), make([]reasons.Reason, len(names))
	l.mu.RLock()
	defer l.mu.RUnlock()
	a := l.asker(&pod, view.Ignored)
	kind, exact := l.kindOf(&view, &pod)
	for i, name := range names {
		suits := placement.Suitability(placement.MaxScore)
		switch a.home {
		case "":
			n := l.nodes[name]
			suits, results[i] = l.suitability(n, &view, &a, kind)
			results[i] = l.reasonBeside(n, &a, results[i])
		case name:
			results[i] = reasons.Fits
		default:
			results[i] = reasons.Elsewhere
		}
		if results[i] == reasons.Fits {
			fitting = append(fitting, placement.Candidate{Node: i, Suits: suits})
		}
	}
	if !exact && a.home == "" {
		l.refine(&view, &a, names, fitting)
	}
	return fitting, results, slices.ContainsFunc(l.tentative, func(p *tentativePlacement) bool { return p.counts(&view) })
}

// chooseCards returns the cards of the node that the policy chooses for the pod, or the reason why the pod doesn't fit. n may be nil.
func (l *Ledger) chooseCards(n *node, a *asker, policy placement.Policy) (gpu.Placement, reasons.Reason) {
	if reason := n.accepts(&a.demand); reason != reasons.Fits {
		return nil, reason
	}
	where, reason := placement.Place(policy, l.cardsFor(n, a), a.demand)
	return where, l.reasonBeside(n, a, reason)
}

// fit returns Fits if the pod fits the node, else the reason why not. A pod with an allocation fits only the node that has it. n may be nil.
func (l *Ledger) fit(n *node, a *asker) reasons.Reason {
	switch {
	case a.home == "":
	case n != nil && n.name == a.home:
		return reasons.Fits
	default:
		return reasons.Elsewhere
	}
	if reason := n.accepts(&a.demand); reason != reasons.Fits {
		return reason
	}
	return l.reasonBeside(n, a, placement.Fit(l.cardsFor(n, a), a.demand))
}

// suitability returns how well the node suits the pod, or the reason why the node's cards have no room. kind is kindOf the pod.
func (l *Ledger) suitability(n *node, view *View, a *asker, kind int) (placement.Suitability, reasons.Reason) {
	if reason := n.accepts(&a.demand); reason != reasons.Fits {
		return 0, reason
	}
	cards := l.cardsInView(n, view, a)
	if kind == noKind {
		return placement.RateNode(&view.Card, &view.Node, cards, &a.demand)
	}
	switch reason := placement.Fit(cards, a.demand); {
	case reason != reasons.Fits:
		return 0, reason
	case len(n.reserved) > 0 || len(n.tentative) > 0:
		return placement.SuitsByCost(l.outlook.CostOf(n.nodeRoom(cards), kind)), reason
	default:
		return l.suitabilityByCost(n, kind), reason
	}
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
	return a.own[r.Source] != r.Reservation && !a.ignored[r.Item.ID] && l.comesBefore(r, a) && !l.allocated(r.Pod.UID)
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
	if l.resources == (memoryOnly{}) || !n.hasReserved() {
		return true
	}
	q := l.queryBeside(n, a)
	return len(q.Ahead) == 0 || l.resources.Fits(q)
}

// hasResourcesNow reports whether the node has CPU and all other resources for the pod beside the pods that have places on it or are nominated to it,
// before any pod ends.
func (l *Ledger) hasResourcesNow(n *node, a *asker) bool {
	if l.resources == (memoryOnly{}) {
		return true
	}
	q := ResourceQuery{Node: n.name, Pods: []gpu.PodUID{a.pod.UID}}
	for uid, other := range n.allocations {
		if other.State == Assumed {
			q.Ahead = append(q.Ahead, uid)
		}
	}
	for r := range l.placesAgainst(n, a) {
		if r.Source == Nominated {
			q.Ahead = append(q.Ahead, r.Pod.UID)
		}
	}
	return l.resources.Fits(q)
}

// askTogether is queryBeside for the pods of an item. The asker is the one that sees the most as used.
func (l *Ledger) askTogether(n *node, pods []gpu.Pod, ignored map[string]bool) (asker, ResourceQuery) {
	lowest := slices.MinFunc(pods, func(a, b gpu.Pod) int { return cmp.Compare(a.Priority, b.Priority) })
	a := l.asker(&lowest, ignored)
	q := l.queryBeside(n, &a)
	q.Pods = nil
	for i := range pods {
		q.Pods = append(q.Pods, pods[i].UID)
	}
	return a, q
}

// queryBeside asks whether the pod fits the node by its resources beside the pods that need a place there and come before it, once those have ended
// that have to end for them: the pods of awaited reservations, as far as the pod sees their cards as used, and those with assumed allocations.
func (l *Ledger) queryBeside(n *node, a *asker) ResourceQuery {
	q := ResourceQuery{Node: n.name, Pods: []gpu.PodUID{a.pod.UID}}
	for r := range l.placesAgainst(n, a) {
		q.Ahead = append(q.Ahead, r.Pod.UID)
		q.Ending = append(append(q.Ending, r.Ending...), r.Victims...)
	}
	for uid, other := range n.allocations {
		if other.State == Assumed && uid != a.pod.UID && (other.Priority >= a.pod.Priority || l.NeedsTurn(*a.pod) || l.isBinding(uid)) {
			q.Ahead = append(q.Ahead, uid)
		}
	}
	q.Ahead, q.Ending = distinct(q.Ahead), distinct(q.Ending) // Several reservations can be for one pod.
	return q
}

func distinct(uids []gpu.PodUID) []gpu.PodUID {
	slices.Sort(uids)
	return slices.Compact(uids)
}

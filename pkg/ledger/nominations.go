package ledger

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// nominee is a pod nominated to a node, with the pods there that are about to be evicted for it.
type nominee struct {
	gpu.Pod
	victims []gpu.PodUID
}

func (n nominee) equal(o nominee) bool { return n.Pod == o.Pod && slices.Equal(n.victims, o.victims) }

// Nominate records that the pod is nominated to the node (status.nominatedNodeName), usually because pods are evicted there for it. The pod has
// no allocation yet, but pods of equal or lower priority see the memory that it is likely to get as used. victims are about to be evicted for
// the pod: their memory counts as if they were terminating already. A pod has at most one nomination: a new one replaces an earlier one.
func (l *Ledger) Nominate(name string, pod gpu.Pod, victims ...gpu.PodUID) {
	added := nominee{Pod: pod, victims: slices.Clone(victims)}
	former, moved := "", false
	l.edit(func(alter func(string, func(*node))) {
		former, moved = l.nominations[pod.UID]
		if moved && former == name && slices.ContainsFunc(l.nodes[name].nominees, added.equal) {
			moved = false
			return
		}
		if moved {
			alter(former, func(n *node) { n.removeNominee(pod.UID) })
		}
		alter(name, func(n *node) { n.addNominee(added) })
		l.nominations[pod.UID] = name
	})
	if moved {
		l.freed(former) // Other pods can use the memory now.
	}
}

// RemoveNomination removes the pod's nomination, if there is one.
func (l *Ledger) RemoveNomination(uid gpu.PodUID) {
	l.mu.RLock()
	_, nominated := l.nominations[uid]
	l.mu.RUnlock()
	if !nominated {
		return // The common case, without the write lock.
	}
	name, allocated := "", false
	l.edit(func(alter func(string, func(*node))) {
		_, allocated = l.nodeOf[uid]
		if name, nominated = l.nominations[uid]; nominated {
			alter(name, func(n *node) { n.removeNominee(uid) })
			delete(l.nominations, uid)
		}
	})
	if nominated && !allocated { // With an allocation the nomination didn't count any more.
		l.freed(name)
	}
}

// NominateAll nominates each pod to the best of its candidate nodes by the view. It nominates one pod after another, so that each pod sees the
// nominations before it. It returns the nodes in the order of the requests; a node is empty if the pod fits none. The nominated pods are
// counted in capacity.
func (l *Ledger) NominateAll(requests []Request, view View, capacity Capacity) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	ranks := rankings{
		ledger: l,
		rate: func(n *node, request *Request) (float64, bool) {
			pod, demand := request.Pod, request.Pod.Demand()
			pod.UID = "" // The ranking is for all pods like this one, which sees its own nomination as free memory.
			suits, reason := l.suit(n, &view, &pod, &demand)
			return float64(suits), reason == reasons.Fits
		},
		put: func(name string, n *node, pod gpu.Pod) bool {
			if reason := placement.Fit(l.cardsFor(n, &pod), pod.Demand()); reason != reasons.Fits || capacity != nil && !capacity.Take(name, pod.UID) {
				return false
			}
			n.addNominee(nominee{Pod: pod})
			l.nominations[pod.UID] = name
			l.markChanged(n)
			return true
		},
	}
	nodes := make([]string, len(requests))
	for i := range requests {
		uid := requests[i].Pod.UID
		_, known := l.nominations[uid]
		if _, allocated := l.nodeOf[uid]; !known && !allocated {
			nodes[i], _ = ranks.first(requests[i:]).place(requests[i].Pod)
		}
	}
	return nodes
}

// addNominee adds a nominated pod. The order is by priority, and then by request, the largest first, because fewer cards have room for it.
func (n *node) addNominee(added nominee) {
	n.nominees = append(n.nominees, added)
	slices.SortFunc(n.nominees, func(a, b nominee) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(b.Request, a.Request), cmp.Compare(a.UID, b.UID))
	})
}

func (n *node) removeNominee(uid gpu.PodUID) {
	n.nominees = slices.DeleteFunc(n.nominees, func(p nominee) bool { return p.UID == uid })
}

// Availability is a node as one pod sees it. It is a copy.
type Availability struct {
	// Cards are ordered by index. The memory that nominated pods of equal or higher priority are likely to get counts as
	// used, which can exceed a card's memory while these pods wait for victims to end.
	Cards []placement.Card
	// Allocations are the node's allocations, in no order.
	Allocations []Allocation
}

// Availability returns a node as the pod sees it, and the reason that Check gives for it.
func (l *Ledger) Availability(name string, pod gpu.Pod) (Availability, reasons.Reason) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.nodes[name]
	demand := pod.Demand()
	reason := l.fit(n, &pod, &demand)
	if home, allocated := l.nodeOf[pod.UID]; allocated {
		reason = reasons.Elsewhere
		if home == name {
			reason = reasons.Fits
		}
	}
	if n.shareable() != reasons.Fits {
		return Availability{}, reason
	}
	return Availability{Cards: slices.Clone(l.cardsFor(n, &pod)), Allocations: n.copyAllocations()}, reason
}

// Outranked returns those of the named nodes, in order, on which a pod of lower priority is bound. On other nodes no card can
// be freed for the pod. It is much cheaper than Availability. It takes the lock once per node.
func (l *Ledger) Outranked(pod gpu.Pod, names []string) (out []string) {
	for _, name := range names {
		if l.outranked(name, pod.Priority) {
			out = append(out, name)
		}
	}
	return out
}

func (l *Ledger) outranked(name string, priority int32) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.nodes[name]
	return n != nil && n.outranked(priority)
}

func (n *node) outranked(priority int32) bool {
	for _, a := range n.allocations {
		if a.State == Bound && a.Priority < priority {
			return true
		}
	}
	return false
}

// fit returns Fits if the pod, which has no allocation, fits the node, else the reason why not. n may be nil. The caller
// holds the lock.
func (l *Ledger) fit(n *node, pod *gpu.Pod, demand *gpu.Demand) reasons.Reason {
	if reason := n.accepts(demand); reason != reasons.Fits {
		return reason
	}
	if len(n.starvation) == 0 && len(n.held) == 0 && len(n.nominees) == 0 {
		return n.totals.Fit(n.cards, demand)
	}
	return l.orReserved(n, pod, placement.Fit(l.cardsFor(n, pod), *demand))
}

// orReserved returns reasons.Reserved instead of the reason if the pod would fit the node without the starvation
// reservation.
func (l *Ledger) orReserved(n *node, pod *gpu.Pod, reason reasons.Reason) reasons.Reason {
	if reason.Resolvable() && l.seesStarvationReservation(n, pod) {
		cards, copied := l.withHold(n, pod)
		if placement.Fit(l.withNominees(n, pod, cards, copied), pod.Demand()) == reasons.Fits {
			return reasons.Reserved
		}
	}
	return reason
}

// suit is fit with the node's suitability.
func (l *Ledger) suit(n *node, view *View, pod *gpu.Pod, demand *gpu.Demand) (placement.Suitability, reasons.Reason) {
	if reason := n.accepts(demand); reason != reasons.Fits {
		return 0, reason
	}
	if len(n.starvation) == 0 && len(n.held) == 0 && len(n.nominees) == 0 && len(n.tentative) == 0 {
		if floor := view.Best.Floor(); floor >= 0 && demand.Cards == 1 && demand.Cores == 0 {
			// This usually avoids reading the cards, which would cost more than the rest of the function.
			if reason := n.totals.Fit(n.cards, demand); reason != reasons.Fits {
				return 0, reason
			}
			if limit := placement.Limit(&view.Node, &n.totals, demand); limit <= floor {
				return limit, reasons.Fits
			}
		}
		return placement.Suit(&view.Card, &view.Node, n.cards, &n.totals, demand)
	}
	cards := l.cardsFor(n, pod)
	if !view.TentativeAt.IsZero() {
		cards = n.withTentative(cards, view, pod)
	}
	totals := placement.Sum(cards)
	suits, reason := placement.Suit(&view.Card, &view.Node, cards, &totals, demand)
	return suits, l.orReserved(n, pod, reason)
}

// cardsFor returns the node's cards as the pod sees them: a copy if nominations, held places or the starvation reservation take
// precedence over the pod. The caller holds the lock, and the node is open.
func (l *Ledger) cardsFor(n *node, pod *gpu.Pod) []placement.Card {
	cards, copied := l.withHold(n, pod)
	if l.seesStarvationReservation(n, pod) {
		if !copied {
			cards, copied = slices.Clone(cards), true
		}
		add(cards, n.starvation)
	}
	return l.withNominees(n, pod, cards, copied)
}

// withNominees returns the cards with what nominated pods are likely to get counted as used. It changes cards if they are
// copied already.
func (l *Ledger) withNominees(n *node, pod *gpu.Pod, cards []placement.Card, copied bool) []placement.Card {
	for _, nominee := range n.nominees {
		if nominee.Priority < pod.Priority {
			break
		}
		if _, allocated := l.nodeOf[nominee.UID]; allocated || nominee.UID == pod.UID {
			continue
		}
		if !copied {
			cards, copied = slices.Clone(cards), true
		}
		add(cards, n.placeNominee(cards, nominee))
	}
	return cards
}

// placeNominee returns the cards that a nominated pod is likely to get: cards with room, or if there are none, cards that have room once the
// terminating pods and the nominee's victims have ended. The result can be empty, because the victims that kube-scheduler chose are unknown
// until they are terminating.
func (n *node) placeNominee(cards []placement.Card, nominee nominee) gpu.Placement {
	demand := nominee.Demand()
	if n.accepts(&demand) != reasons.Fits {
		return nil // The node has changed since.
	}
	where, reason := placement.Place(placement.Expected, cards, demand)
	if !reason.Resolvable() {
		return where
	}
	cards = slices.Clone(cards)
	for _, a := range n.allocations {
		if a.Leaving || slices.Contains(nominee.victims, a.UID) {
			subtract(cards, a.Placement)
		}
	}
	where, _ = placement.Place(placement.Expected, cards, demand)
	return where
}

package ledger

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Availability is a node as one pod sees it. It is a copy.
type Availability struct {
	// Cards are ordered by index. What is reserved against the pod counts as used, which can exceed a card's memory while other pods still use
	// it.
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
	reason := l.fit(name, n, &pod, &demand)
	if home, allocated := l.nodeOf[pod.UID]; allocated {
		reason = reasons.Elsewhere
		if home == name {
			reason = reasons.Fits
		}
	}
	return l.availability(n, &pod, nil), reason
}

// AvailabilityWithout returns a node as the pod sees it without the awaited reservations of some items, by their IDs.
func (l *Ledger) AvailabilityWithout(name string, pod gpu.Pod, unseen map[string]bool) Availability {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.availability(l.nodes[name], &pod, unseen)
}

// availability returns a node as the pod sees it; none if it doesn't share its cards. n may be nil. The caller holds the lock.
func (l *Ledger) availability(n *node, pod *gpu.Pod, unseen map[string]bool) Availability {
	if n.shareable() != reasons.Fits {
		return Availability{}
	}
	return Availability{Cards: slices.Clone(l.cardsFor(n, pod, true, unseen)), Allocations: n.copyAllocations()}
}

// Outranked returns those of the named nodes, in order, on which a pod of lower priority is bound. On other nodes no card can be freed for the
// pod. It is much cheaper than Availability. It takes the lock once per node.
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
	if n == nil {
		return false
	}
	for _, a := range n.allocations {
		if a.State == Bound && a.Priority < priority {
			return true
		}
	}
	return false
}

// fit returns Fits if the pod, which has no allocation, fits the node, else the reason why not. n may be nil. The caller holds the lock.
func (l *Ledger) fit(name string, n *node, pod *gpu.Pod, demand *gpu.Demand) reasons.Reason {
	if reason := n.accepts(demand); reason != reasons.Fits {
		return reason
	}
	if !n.keeps() {
		return n.totals.Fit(n.cards, demand)
	}
	return l.orKept(l.orReserved(n, pod, placement.Fit(l.cardsFor(n, pod, true, nil), *demand)), name, n, pod, nil)
}

// suit returns how well the node suits the pod, or the reason why it doesn't fit. Unlike fit, it doesn't ask whether CPU and other resources are kept for
// others: Rank does (orKept), where it is needed. kind is kindOf the pod.
func (l *Ledger) suit(n *node, view *View, pod *gpu.Pod, demand *gpu.Demand, kind int) (placement.Suitability, reasons.Reason) {
	if reason := n.accepts(demand); reason != reasons.Fits {
		return 0, reason
	}
	if kind != noKind {
		return l.suitByCost(n, view, pod, demand, kind)
	}
	if len(n.reserved) == 0 && len(n.tentative) == 0 {
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
	cards := l.cardsSeen(n, view, pod)
	totals := placement.Sum(cards)
	suits, reason := placement.Suit(&view.Card, &view.Node, cards, &totals, demand)
	return suits, l.orReserved(n, pod, reason)
}

// cardsSeen returns the node's cards as the pod sees them in the view. The caller must not change them.
func (l *Ledger) cardsSeen(n *node, view *View, pod *gpu.Pod) []placement.Card {
	cards := l.cardsFor(n, pod, true, view.Unseen)
	if !view.TentativeAt.IsZero() {
		cards = n.withTentative(cards, view, pod)
	}
	return cards
}

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
	// it. A node that doesn't share its cards has none.
	Cards []placement.Card
	// Allocations are the node's allocations, in no order.
	Allocations []Allocation
}

// Availability returns a node as the pod sees it without the awaited reservations of the items in ignored, which can be nil. With these reservations, it
// returns Fits, or the reason why the pod doesn't fit the node.
func (l *Ledger) Availability(name string, pod gpu.Pod, ignored map[string]bool) (Availability, reasons.Reason) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n, a := l.nodes[name], l.asker(&pod, nil)
	reason := l.fit(n, &a)
	if n.shareable() != reasons.Fits {
		return Availability{}, reason
	}
	a.ignored = ignored
	return Availability{Cards: slices.Clone(l.cardsFor(n, &a)), Allocations: n.copyAllocations()}, reason
}

// NodesWithLowerPriority returns those of the named nodes, in order, on which a pod of lower priority is bound. On other nodes no card can be freed for the
// pod. It is much cheaper than Availability.
func (l *Ledger) NodesWithLowerPriority(pod gpu.Pod, names []string) (out []string) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, name := range names {
		if n := l.nodes[name]; n != nil && n.hasBoundBelow(pod.Priority) {
			out = append(out, name)
		}
	}
	return out
}

func (n *node) hasBoundBelow(priority int32) bool {
	for _, a := range n.allocations {
		if a.State == Bound && a.Priority < priority {
			return true
		}
	}
	return false
}

// NodesAheadOfWatch returns those of the named nodes, in order, that have pods that are being deleted and no room for the pod by the sum of their cards.
// kube-scheduler counts by this sum. If it offers such a node to the pod, it has seen the end of some of its pods before the ledger has.
func (l *Ledger) NodesAheadOfWatch(pod gpu.Pod, names []string) (out []string) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, name := range names {
		if n := l.nodes[name]; n != nil && n.leaving > 0 {
			if requested, _ := n.requests(); requested.Add(pod.Request) > n.memory() {
				out = append(out, name)
			}
		}
	}
	return out
}

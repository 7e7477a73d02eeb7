package ledger

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Shortlists returns the number of different lists of nodes among which ReserveAwaited chooses with the lock held.
func (l *Ledger) Shortlists(item Item, requests []Request, oldest time.Time) int {
	lists := map[listKey]bool{}
	for _, request := range (&awaitedChoice{Ledger: l, item: item, oldest: oldest, known: map[gpu.Demand]map[string]float64{}}).shortlist(requests) {
		lists[keyOf(request.Nodes)] = true
	}
	return len(lists)
}

// ForgetCosts makes the next call of Rank compute the costs of each node.
func (l *Ledger) ForgetCosts() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.nodes {
		n.costs.Store(nil)
	}
}

// ReservedOn returns the pods with places of plans, of fair sharing and of reclaim on the node.
func (l *Ledger) ReservedOn(name string) (uids []gpu.PodUID) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	n := l.nodes[name]
	if n == nil {
		return nil
	}
	for uid, a := range n.allocations {
		if a.State == Assumed && l.reservations.placed[uid].Source != Direct {
			uids = append(uids, uid)
		}
	}
	for i := range n.reserved {
		if r := &n.reserved[i]; r.Source == Reclaimed {
			uids = append(uids, r.Pod.UID)
		}
	}
	return distinct(uids)
}

// ForEachFit calls visit for each of the named nodes, in order, with the reason that Availability gives for it.
func (l *Ledger) ForEachFit(pod gpu.Pod, names []string, visit func(name string, reason reasons.Reason)) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	a := l.asker(&pod, nil)
	for _, name := range names {
		visit(name, l.fit(l.nodes[name], &a))
	}
}

package dispatch

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// nodesPerEffort is how many empty nodes are tried with as much effort as one attempt to reserve places takes, see maxEffort.
const nodesPerEffort = 32

// try reserves places for the pods of an item. awaits is true if it has an awaited reservation. try returns nil if the pods don't fit now.
func (r *round) try(it *item, awaits bool) (places []ledger.ChosenNode) {
	number, due := r.m.progress.rounds, it.kind.isDue(r.m.now)
	tries := awaits || !it.kind.hasNoRoom(number)
	var requests []ledger.Request
	switch {
	case due:
		requests = r.m.requests(it)
	case tries: // Since the latest attempt, only these nodes can have got room.
		requests = r.m.requestsOn(it, r.freed)
	}
	if tries {
		places = r.reserve(requests)
	}
	if places != nil {
		return places
	}
	it.kind.fail(number)
	if due {
		it.kind.failEverywhere(r.m.everFit(requests), r.m.now)
	}
	return nil
}

// reserve reserves places for the requests, if there are any. It returns nil if not all of them fit.
func (r *round) reserve(requests []ledger.Request, yielding ...[]gpu.PodUID) []ledger.ChosenNode {
	if len(requests) == 0 {
		return nil
	}
	view := r.m.View // Pods avoid the tentative placements of others, because those would be rejected at their binds.
	view.TentativeAt, view.Unseen = r.m.now, r.unseen
	places, _ := r.m.Ledger.ReserveAll(requests, yielding, view, r.m.now)
	return places
}

// everFit reports whether the pods would fit if no pod had GPU memory: by the cards, and by the other resources that they request, such as CPU. What
// wouldn't fit doesn't count for its tenant's demand.
func (m *Manager) everFit(requests []ledger.Request) bool {
	fit := m.Ledger.FitsEmpty(requests)
	if !fit { // Otherwise they have mostly room on the first nodes.
		m.effort += len(requests[0].Nodes) / nodesPerEffort
	}
	return fit
}

// requests returns what the ledger must place, on all nodes.
func (m *Manager) requests(it *item) []ledger.Request {
	m.effort++
	requests := make([]ledger.Request, len(it.pods))
	for i, p := range it.pods {
		m.spendFor(p.Constraints)
		requests[i] = ledger.Request{Pod: p.Pod.Pod, Nodes: m.Nodes.Names(p.Constraints)}
	}
	return requests
}

// requestsOn returns what the ledger must place if only these nodes can have got room; nil if the item can't use them. Of several pods, some may fit
// elsewhere.
func (m *Manager) requestsOn(it *item, nodes []string) []ledger.Request {
	for _, p := range it.pods {
		m.spendFor(p.Constraints)
		usable := m.Nodes.Among(p.Constraints, nodes)
		switch {
		case len(usable) == 0:
		case len(it.pods) == 1:
			return []ledger.Request{{Pod: p.Pod.Pod, Nodes: usable}}
		default:
			return m.requests(it)
		}
	}
	return nil
}

package dispatch

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// maxSearches is the number of items of each tenant for which one round tries all nodes without success, because event handlers wait for the end of the
// round: an item with new constraints takes milliseconds in a large cluster. The next rounds try the others. Unfinished tenants share this number, so
// that many of them take no longer, and all others together have twice as many.
const maxSearches = 16

// try reserves places for the pods of an item. awaits is true if it has an awaited reservation. try returns nil if the pods don't fit now.
func (r *round) try(it *item, awaits bool) []ledger.ChosenNode {
	m, k, own := r.m, it.kind, r.m.keptFor(it.Tenant)
	if k.failedIn == r.number && !awaits && len(own) == 0 {
		return nil // There can be thousands of these.
	}
	nodes, unseen := r.freed, r.unseen
	if len(own) > 0 {
		nodes, unseen = slices.Clone(nodes), maps.Clone(unseen)
		for _, k := range own {
			nodes = append(nodes, k.Node)
			unseen[k.id()] = true
		}
		nodes = sorted(nodes)
	}
	var requests []ledger.Request
	due := k.isDue(m.now)
	search := due && r.maySearch(it)
	if !search && (!due || k.searchedIn > 0) { // Since the latest attempt, only these nodes can have got room.
		requests = m.requestsOn(it, nodes)
		if len(it.pods) > 1 && len(requests) > 0 { // Some of the pods may fit elsewhere.
			due, search = true, r.maySearch(it)
		}
	}
	switch {
	case search:
		requests = m.requests(it)
	case due:
		k.retryAt = time.Time{}
		if len(it.pods) > 1 || k.searchedIn == 0 {
			return nil
		}
	}
	if len(requests) > 0 {
		view := m.View // Pods avoid the tentative placements of others, because those would be rejected at their binds.
		view.TentativeAt, view.Ignored = m.now, unseen
		if places, _ := m.Ledger.ReserveAll(requests, nil, view, m.now); places != nil {
			return places
		}
	}
	k.failedIn = r.number
	switch {
	case search:
		r.countSearch(it.Tenant)
		k.searchedIn = r.number
		k.failEverywhere(m.Ledger.FitsEmpty(requests), m.now)
	case k.obstacle == reasons.ObstacleNeverFits && len(requests) > 0 && m.Ledger.FitsEmpty(requests):
		k.obstacle = reasons.ObstacleNoRoom
	}
	return nil
}

// maySearch reports whether all nodes may be tried for the item in this round. If a round can't try all of a tenant's items that are due, the next ones
// first try those that have not been tried since.
func (r *round) maySearch(it *item) bool {
	own := r.tenant(it.Tenant)
	former, behind := r.m.unfinished[it.Tenant]
	if behind && it.kind.searchedIn >= former.since {
		return false
	}
	if own.waits || behind && own.searches == r.each || !behind && (own.searches == maxSearches || r.searches == 2*maxSearches) {
		own.unfinished = true
		return false
	}
	return true
}

// countSearch counts that all nodes were tried for an item of the tenant without success.
func (r *round) countSearch(tenant string) {
	r.tenant(tenant).searches++
	if _, behind := r.m.unfinished[tenant]; !behind {
		r.searches++
	}
}

// requests returns what the ledger must place, on all nodes.
func (m *Manager) requests(it *item) []ledger.Request {
	requests := make([]ledger.Request, len(it.pods))
	for i, p := range it.pods {
		requests[i] = ledger.Request{Pod: p.Pod.Pod, Nodes: m.Nodes.UsableNodes(p.Constraints)}
	}
	return requests
}

// requestsOn returns what the ledger must place on these nodes: those of the pods that can use some of them.
func (m *Manager) requestsOn(it *item, nodes []string) (requests []ledger.Request) {
	if len(nodes) == 0 {
		return nil
	}
	for _, p := range it.pods {
		if usable := m.Nodes.UsableAmong(p.Constraints, nodes); len(usable) > 0 {
			requests = append(requests, ledger.Request{Pod: p.Pod.Pod, Nodes: usable})
		}
	}
	return requests
}

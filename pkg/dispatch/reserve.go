package dispatch

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// maxSearches limits the items of each tenant for which one round tries all nodes without success, because event handlers wait for the end of the round.
// The next rounds try the others. Unfinished tenants share this number, so that many of them take no longer, and all others together have twice as many.
// With more than searchedNodes nodes it is smaller, but no smaller than minSearches.
const maxSearches, minSearches, searchedNodes = 16, 2, 1500

// searchLimit returns maxSearches for a cluster with so many nodes.
func searchLimit(nodes int) int {
	return max(min(maxSearches, maxSearches*searchedNodes/max(nodes, 1)), minSearches)
}

// try reserves places for the pods of an item, and returns nil if they don't fit now. awaits is true if it has an awaited reservation. Since all nodes were
// tried for its kind, only the freed nodes can have got room, and those on which memory is kept for its tenant:
//
//	the item is                            it is tried on
//	due, and all nodes may be tried        all nodes
//	due, of a kind that was never tried    none; it stays due
//	due, another pod                       the freed nodes; it stays due
//	due, another group                     none; it stays due
//	not due, a pod                         the freed nodes
//	not due, a group                       none
//
// A group is due at once if one of its pods can use a freed node: the others may fit elsewhere.
func (r *round) try(it *item, awaits bool) []ledger.ChosenNode {
	m, k, own := r.m, it.kind, r.m.kept[it.Tenant]
	if k.failedIn == r.number && !awaits && len(own) == 0 {
		return nil // There can be thousands of these.
	}
	freed, ignored := r.freed, r.ignored
	if len(own) > 0 {
		freed, ignored = slices.Clone(freed), maps.Clone(ignored)
		for _, ended := range own {
			freed = append(freed, ended.Node)
			ignored[ended.id()] = true
		}
		freed = sorted(freed)
	}
	isGroup := len(it.pods) > 1
	switch due := k.isDue(m.now) || isGroup && len(m.requestsOn(it, freed)) > 0; {
	case due && r.maySearch(it):
		return r.tryAll(it, ignored)
	case due:
		k.retryAt = time.Time{}
		if isGroup || k.searchedIn == 0 {
			return nil
		}
	case isGroup:
		freed = nil
	}
	return r.tryOn(it, freed, ignored)
}

// tryAll tries all nodes.
func (r *round) tryAll(it *item, ignored map[string]bool) []ledger.ChosenNode {
	requests := r.m.requests(it)
	places := r.reserve(requests, ignored)
	if places == nil {
		r.countSearch(it.Tenant)
		it.kind.failedIn, it.kind.searchedIn = r.number, r.number
		it.kind.failEverywhere(r.m.Ledger.FitsEmpty(requests), r.m.now)
	}
	return places
}

// tryOn tries those of the nodes that the item can use.
func (r *round) tryOn(it *item, nodes []string, ignored map[string]bool) []ledger.ChosenNode {
	if requests := r.m.requestsOn(it, nodes); len(requests) > 0 {
		if places := r.reserve(requests, ignored); places != nil {
			return places
		}
		if it.kind.obstacle == reasons.ObstacleNeverFits && r.m.Ledger.FitsEmpty(requests) {
			it.kind.obstacle = reasons.ObstacleNoRoom
		}
	}
	it.kind.failedIn = r.number
	return nil
}

// reserve reserves places for all requests or for none. Pods avoid the tentative placements of others, because those would be rejected at their binds.
func (r *round) reserve(requests []ledger.Request, ignored map[string]bool) []ledger.ChosenNode {
	view := r.m.View
	view.TentativeAt, view.Ignored = r.m.now, ignored
	places, _ := r.m.Ledger.ReserveAll(requests, nil, view, r.m.now)
	return places
}

// maySearch reports whether all nodes may be tried for the item in this round. If a round can't try all of a tenant's items that are due, the next ones
// first try those that have not been tried since.
func (r *round) maySearch(it *item) bool {
	own := r.searchesOf(it.Tenant)
	switch {
	case own.isUnfinished() && it.kind.searchedIn >= own.since:
		return false
	case own.left == 0, !own.isUnfinished() && r.left == 0:
		own.others = true
		return false
	}
	return true
}

// countSearch counts that all nodes were tried for an item of the tenant without success.
func (r *round) countSearch(tenant string) {
	own := r.searchesOf(tenant)
	own.left, own.latest = own.left-1, r.number
	if !own.isUnfinished() {
		r.left--
	}
}

// searchesOf returns how far the round is with the tenant.
func (r *round) searchesOf(tenant string) *searches {
	if r.searches[tenant] == nil {
		r.searches[tenant] = &searches{left: r.limit}
	}
	return r.searches[tenant]
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

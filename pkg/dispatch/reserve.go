package dispatch

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// maxSearches is the number of items of each tenant for which one round tries all nodes without success, because event handlers wait for the end of the
// round. The next rounds try the others.
const maxSearches = 32

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
	if !due { // Since the latest attempt, only these nodes can have got room.
		requests = m.requestsOn(it, nodes)
		due = len(it.pods) > 1 && len(requests) > 0 // Some of the pods may fit elsewhere.
	}
	if due {
		if !r.maySearch(it) {
			k.retryAt = time.Time{}
			return nil
		}
		requests = m.requests(it)
	}
	if len(requests) > 0 {
		view := m.View // Pods avoid the tentative placements of others, because those would be rejected at their binds.
		view.TentativeAt, view.Unseen = m.now, unseen
		if places, _ := m.Ledger.ReserveAll(requests, nil, view, m.now); places != nil {
			return places
		}
	}
	k.failedIn = r.number
	switch {
	case due:
		r.tenant(it.Tenant).searches++
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
	if since, unfinished := r.m.unfinished[it.Tenant]; unfinished && it.kind.searchedIn >= since {
		return false
	}
	if own.searches == maxSearches {
		own.unfinished = true
		return false
	}
	return true
}

// requests returns what the ledger must place, on all nodes.
func (m *Manager) requests(it *item) []ledger.Request {
	requests := make([]ledger.Request, len(it.pods))
	for i, p := range it.pods {
		requests[i] = ledger.Request{Pod: p.Pod.Pod, Nodes: m.Nodes.Names(p.Constraints)}
	}
	return requests
}

// requestsOn returns what the ledger must place on these nodes: those of the pods that can use some of them.
func (m *Manager) requestsOn(it *item, nodes []string) (requests []ledger.Request) {
	if len(nodes) == 0 {
		return nil
	}
	for _, p := range it.pods {
		if usable := m.Nodes.Among(p.Constraints, nodes); len(usable) > 0 {
			requests = append(requests, ledger.Request{Pod: p.Pod.Pod, Nodes: usable})
		}
	}
	return requests
}

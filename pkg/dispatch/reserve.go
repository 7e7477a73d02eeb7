package dispatch

import (
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// try reserves places for the pods of a unit. awaits is true if it has an awaited reservation. try returns nil if the pods don't fit now.
func (r *round) try(u *unit, awaits bool) (places []ledger.ChosenNode) {
	if awaits || !u.kind.hasNoRoom(r.m.progress.rounds) {
		places = r.reserve(u)
	}
	if places != nil {
		return places
	}
	u.kind.fail(r.m.progress.rounds)
	if u.kind.obstacle == reasons.ObstacleUntried {
		u.kind.obstacle = reasons.ObstacleNoRoom
		if !r.m.everFits(u) {
			u.kind.obstacle = reasons.ObstacleNeverFits
		}
	}
	return nil
}

// reserve reserves places for the pods of a unit on all nodes, or on those on which something was freed if the unit had no room before.
// It returns nil if they don't fit now.
func (r *round) reserve(u *unit) (places []ledger.ChosenNode) {
	var requests []ledger.Request
	if u.kind.obstacle == reasons.ObstacleUntried {
		requests = r.m.requests(u)
	} else if requests = r.m.requestsOn(u, r.freed); requests == nil {
		return nil
	}
	places, _ = r.m.Ledger.ReserveAll(requests, nil, r.view(), r.now)
	return places
}

// requests returns what the ledger must place, on all nodes.
func (m *Manager) requests(u *unit) []ledger.Request {
	m.effort++
	requests := make([]ledger.Request, len(u.pods))
	for i, p := range u.pods {
		m.spendFor(p.Constraints)
		requests[i] = m.request(p, m.Nodes.Names(p.Constraints))
	}
	return requests
}

// request returns what the ledger must place for a pod.
func (m *Manager) request(p *pod, nodes []string) ledger.Request {
	return ledger.Request{Pod: p.Pod.Pod, Nodes: nodes, Last: m.contested.last(p.Constraints)}
}

// requestsOn returns what the ledger must place if only these nodes can have got room; nil if the unit can't use them. Of several pods, some may fit
// elsewhere.
func (m *Manager) requestsOn(u *unit, nodes []string) []ledger.Request {
	for _, p := range u.pods {
		m.spendFor(p.Constraints)
		usable := m.Nodes.Among(p.Constraints, nodes)
		switch {
		case len(usable) == 0:
		case len(u.pods) == 1:
			return []ledger.Request{m.request(p, usable)}
		default:
			return m.requests(u)
		}
	}
	return nil
}

// view returns the view for granted pods. They avoid the tentative placements of other pods, because those pods would be rejected at
// their binds.
func (r *round) view() ledger.View {
	view := r.m.View
	view.TentativeAt, view.Unseen = r.now, r.unseen
	return view
}

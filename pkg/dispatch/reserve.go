package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// try reserves places for the pods of a unit. It returns nil if they don't fit now.
func (m *Manager) try(u *unit, capacity ledger.Capacity, now time.Time) (places []ledger.Place) {
	if _, awaits := m.awaiting[u.item.ID]; awaits || !u.kind.hasNoRoom(m.rounds) {
		places = m.reserve(u, capacity, now)
	}
	if places != nil {
		return places
	}
	u.kind.fail(m.rounds)
	if u.kind.obstacle == reasons.ObstacleUntried {
		if u.kind.obstacle = reasons.ObstacleNoRoom; !m.everFits(u) {
			u.kind.obstacle = reasons.ObstacleNeverFits
		}
	}
	return nil
}

// reserve reserves places for the pods of a unit on all nodes, or on those on which something was freed if the unit had no room before.
// It returns nil if they don't fit now.
func (m *Manager) reserve(u *unit, capacity ledger.Capacity, now time.Time) (places []ledger.Place) {
	var requests []ledger.Request
	if u.kind.obstacle == reasons.ObstacleUntried {
		requests = m.requests(u)
	} else if requests = m.requestsOn(u, m.freedNow); requests == nil {
		return nil
	}
	places, _ = m.Ledger.ReserveAll(requests, nil, m.viewAt(now), capacity, now)
	return places
}

// requests returns what the ledger must place, on all nodes.
func (m *Manager) requests(u *unit) []ledger.Request {
	m.effort++
	requests := make([]ledger.Request, len(u.pods))
	for i, p := range u.pods {
		requests[i] = m.request(p, m.eligibleFor(p.Constraints))
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

// viewAt returns the view for granted pods. They avoid the tentative placements of other pods, because those pods would be rejected at
// their binds.
func (m *Manager) viewAt(now time.Time) ledger.View {
	view := m.View
	view.TentativeAt, view.Unseen = now, m.unseen
	return view
}

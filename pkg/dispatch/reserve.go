package dispatch

import (
	"slices"
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
	hadNoRoom := u.kind.obstacle != reasons.ObstacleUntried
	if hadNoRoom && len(m.freedNow) == 0 {
		return nil
	}
	if !hadNoRoom {
		m.effort++
	}
	if requests := m.requests(u, hadNoRoom); requests != nil {
		places, _ = m.Ledger.ReserveAll(requests, nil, m.viewAt(now), capacity, now)
	}
	return places
}

// requests returns what the ledger must place. If the unit had no room before, only nodes on which something was freed can have
// room now; it returns nil if there is none. Of several pods, some may fit where nothing was freed.
func (m *Manager) requests(u *unit, hadNoRoom bool) []ledger.Request {
	if hadNoRoom && !slices.ContainsFunc(u.pods, func(p *pod) bool { return len(m.freedFor(p.Constraints)) > 0 }) {
		return nil
	}
	requests := make([]ledger.Request, len(u.pods))
	for i, p := range u.pods {
		requests[i].Pod = p.Pod.Pod
		if hadNoRoom && len(u.pods) == 1 {
			requests[i].Nodes = m.freedFor(p.Constraints)
		} else {
			requests[i].Nodes = m.eligibleFor(p.Constraints)
		}
	}
	return requests
}

// viewAt returns the view for granted pods. They avoid the tentative placements of other pods, because those pods would be rejected at
// their binds.
func (m *Manager) viewAt(now time.Time) ledger.View {
	view := m.View
	view.TentativeAt, view.Unseen = now, m.unseen
	return view
}

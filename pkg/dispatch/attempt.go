package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// attempt is one try of reclaim to make room for units, until its evictions were made or the term ends.
type attempt struct {
	// kinds are the kinds of units that get room. They pause if the attempt fails.
	kinds []tenantKind
	// outdated is true if something changed while the plan was made, and the plan could not be used.
	outdated bool
}

// tenantKind is a kind of units of a tenant, or all of its units if kind is zero.
type tenantKind struct {
	tenant string
	kind   kindKey
}

func (u *unit) tenantKind() tenantKind { return tenantKind{u.item.Tenant, u.kind.kindKey} }

// beginAttempt requests room for the tenants that have been below their share for long enough.
func (m *Manager) beginAttempt(s *standings, starving []starvingTenant) {
	units := m.reclaimUnits(starving)
	if len(units) == 0 {
		return
	}
	a := &attempt{}
	search := m.search(a, s)
	for _, u := range units {
		out := reclaim.Unit{Tenant: u.item.Tenant, Item: u.item.ID}
		for _, p := range u.pods {
			out.Pods = append(out.Pods, reclaim.Pod{Pod: p.Pod.Pod})
			search.constraints = append(search.constraints, p.Constraints)
		}
		search.need.Units = append(search.need.Units, out)
		a.kinds = append(a.kinds, u.tenantKind())
	}
	m.reclaims.attempt, m.effects.Reclaim = a, search
}

// reclaimUnits returns the units for which the next attempt makes room, of the tenants that have been below their share for long enough. It takes them
// from the tenants alternately.
func (m *Manager) reclaimUnits(starving []starvingTenant) (units []*unit) {
	pods := 0
	for i, more := 0, true; more; i++ {
		more = false
		for _, s := range starving {
			if i >= len(s.units) || m.reclaims.below[s.Name] < m.ReclaimAfter {
				continue
			}
			more = true
			u := s.units[i]
			if m.units[u.item.ID] != u || m.hasHold(u) || m.reclaims.pausing(u, m.now) || u.obstacle() != reasons.ObstacleNoRoom || u.kind.isDue(m.now) {
				continue
			}
			pods += len(u.pods)
			if pods > maxReclaim && len(units) > 0 {
				return units
			}
			units = append(units, u)
		}
	}
	return units
}

// Reclaimed records that the caller has made the evictions for a search. until is when its places are given up if they aren't free; zero if no
// eviction was made.
func (m *Manager) Reclaimed(s *Search, until time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := m.reclaims.attempt
	if a != s.attempt { // The term has ended.
		return
	}
	m.reclaims.attempt = nil
	if until.IsZero() {
		m.endHolds(func(h *hold) bool { return h.state == making })
	}
	held := false
	for _, h := range m.reclaims.holds {
		if h.state == making {
			h.state, h.ends = waiting, until
			held = held || m.unitOf(h) != nil
		}
	}
	if !held {
		for _, kind := range a.kinds {
			m.reclaims.pause(kind, !a.outdated, m.now)
		}
	}
}

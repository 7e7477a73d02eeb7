package dispatch

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// attempt is one try of reclaim to make room for units, until its evictions were made or the term ends.
type attempt struct {
	number uint64
	// kinds are the kinds of units that get room. They pause if the attempt fails.
	kinds []pauseKey
	// outdated is true if something changed while the plan was made, and the plan could not be used.
	outdated bool
}

// pauseKey is a kind of units of a tenant, or all of them if kind is zero.
type pauseKey struct {
	tenant string
	kind   kindKey
}

func (u *unit) pauseKey() pauseKey { return pauseKey{u.item.Tenant, u.kind.kindKey} }

// beginAttempt requests room for the tenants that have been below their share for long enough.
func (m *Manager) beginAttempt(s *standings, starving []starvingTenant, now time.Time) {
	units := m.reclaimUnits(slices.DeleteFunc(slices.Clone(starving), func(s starvingTenant) bool {
		return m.reclaims.below[s.Name] < m.ReclaimAfter
	}), now)
	if len(units) == 0 {
		return
	}
	r := &m.reclaims
	r.attempts++
	r.attempt = &attempt{number: r.attempts}
	search := m.search(r.attempts, s, now)
	for _, u := range units {
		out := reclaim.Unit{Tenant: u.item.Tenant, Item: u.item.ID}
		for _, p := range u.pods {
			out.Pods = append(out.Pods, reclaim.Pod{Pod: p.Pod.Pod})
			search.constraints = append(search.constraints, p.Constraints)
		}
		search.need.Units = append(search.need.Units, out)
		r.attempt.kinds = append(r.attempt.kinds, u.pauseKey())
	}
	m.effects.Reclaim = search
}

// reclaimUnits returns the units for which the next attempt makes room. It takes them from the tenants alternately.
func (m *Manager) reclaimUnits(starving []starvingTenant, now time.Time) (units []*unit) {
	pods := 0
	for i := 0; ; i++ {
		more := false
		for _, s := range starving {
			if i >= len(s.units) {
				continue
			}
			more = true
			u := s.units[i]
			if m.units[u.item.ID] != u || m.hasHold(u) || m.reclaims.pausing(u, now) || u.obstacle() != reasons.ObstacleNoRoom {
				continue
			}
			pods += len(u.pods)
			if pods > maxReclaim && len(units) > 0 {
				return units
			}
			units = append(units, u)
		}
		if !more {
			return units
		}
	}
}

// Reclaimed records that the caller has made the evictions of an attempt. until is when its places are given up if they aren't free; zero if no
// eviction was made.
func (m *Manager) Reclaimed(attempt uint64, until, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := m.reclaims.attempt
	if a == nil || a.number != attempt {
		return
	}
	m.reclaims.attempt = nil
	held := false
	for _, h := range m.reclaims.holds {
		if h.attempt == attempt {
			h.state, h.ends, held = waiting, until, true
		}
	}
	if until.IsZero() || !held {
		for _, kind := range a.kinds {
			m.reclaims.pause(kind, !a.outdated, now)
		}
		m.endHolds(func(h *hold) bool { return h.attempt == attempt })
	}
}

// pausing reports whether no attempt may be made for the unit, because the latest one had no success.
func (r *reclaims) pausing(u *unit, now time.Time) bool {
	return r.pauses.Has(u.pauseKey(), now) || r.pauses.Has(pauseKey{tenant: u.item.Tenant}, now)
}

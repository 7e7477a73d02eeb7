package dispatch

import (
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// tenantKind is a kind of items of a tenant, or all of its items if kind is zero.
type tenantKind struct {
	tenant string
	kind   unique.Handle[string]
}

func (it *item) tenantKind() tenantKind { return tenantKind{it.Tenant, it.kind.key} }

// beginAttempt requests room for the tenants that have been below their share for long enough. An attempt is one try to make room for items, from then
// until Reclaimed.
func (m *Manager) beginAttempt(s *standings, starving []starvingTenant) {
	items := m.reclaimItems(starving)
	if len(items) == 0 {
		return
	}
	search := m.search(s)
	for _, it := range items {
		out := reclaim.Item{Tenant: it.Tenant, ID: it.ID}
		for _, p := range it.pods {
			out.Pods = append(out.Pods, reclaim.Pod{Pod: p.Pod.Pod})
			search.constraints = append(search.constraints, p.Constraints)
		}
		search.need.Items = append(search.need.Items, out)
		search.kinds = append(search.kinds, it.tenantKind())
	}
	m.reclaims.search, m.effects.Reclaim = search, search
}

// reclaimItems returns the items for which the next attempt makes room, of the tenants that have been below their share for long enough. It takes them
// from the tenants alternately.
func (m *Manager) reclaimItems(starving []starvingTenant) (items []*item) {
	pods := 0
	for i, more := 0, true; more; i++ {
		more = false
		for _, s := range starving {
			if i >= len(s.items) || m.reclaims.below[s.Name] < m.ReclaimAfter {
				continue
			}
			more = true
			it := s.items[i]
			if m.items[it.ID] != it || m.hasHold(it) || m.reclaims.pausing(it, m.now) || it.obstacle() != reasons.ObstacleNoRoom || it.kind.isDue(m.now) {
				continue
			}
			pods += len(it.pods)
			if pods > maxReclaim && len(items) > 0 {
				return items
			}
			items = append(items, it)
		}
	}
	return items
}

// Reclaimed records that the caller has made the evictions for a search. until is when its places are given up if they aren't free; zero if no
// eviction was made.
func (m *Manager) Reclaimed(s *Search, until time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.reclaims.search != s { // The term has ended, or the plan was outdated.
		return
	}
	m.reclaims.search = nil
	if until.IsZero() {
		m.endHolds((*hold).isMaking)
	}
	held := map[tenantKind]bool{}
	for _, h := range m.reclaims.holds {
		if h.isMaking() {
			h.ends, held[h.tenantKind] = until, held[h.tenantKind] || m.itemOf(h) != nil
		}
	}
	for _, kind := range s.kinds {
		if !held[kind] {
			m.reclaims.pause(kind, m.now)
		}
	}
}

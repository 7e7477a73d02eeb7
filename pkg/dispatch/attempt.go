package dispatch

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// attempt is one try of reclaim to make room for units.
type attempt struct {
	number uint64
	// kinds are those of its units, by the first pod of each.
	kinds map[gpu.PodUID]reclaimKind
	// evicts is false if it only holds what pods that are being deleted will free. outdated is true if something changed while the plan
	// was made, and the plan could not be used.
	evicts, outdated bool
	// allocated is what the tenants had when places were held for them.
	allocated map[string]gpu.Memory
	// working is true while the caller evicts.
	working bool
	// held are the units for which places are held.
	held []*heldUnit
	// pods are the pods of held.
	pods map[gpu.PodUID]bool
}

// reclaimKind is a kind of units of a tenant, or all of them if kind is zero.
type reclaimKind struct {
	tenant string
	kind   kindKey
}

func (u *unit) reclaimKind() reclaimKind { return reclaimKind{u.item.Tenant, u.kind.kindKey} }

type reclaimPause struct {
	until  time.Time
	length time.Duration
}

// beginAttempt requests room for the tenants that have been below their share for long enough.
//
// The former leader may have evicted pods that are still being deleted. So a new leader evicts none for ReclaimAfter, but it holds
// what they free.
func (m *Manager) beginAttempt(s *standings, starving []starvingTenant, now time.Time) {
	ripe := slices.DeleteFunc(slices.Clone(starving), func(s starvingTenant) bool {
		return m.reclaims.below[s.Name] < m.ReclaimAfter
	})
	evicts := len(ripe) > 0
	if !evicts && now.Sub(m.reclaims.since) < m.ReclaimAfter && m.allocated.leaving > 0 {
		ripe = starving
	}
	units := m.reclaimUnits(ripe, now)
	if len(units) == 0 {
		return
	}
	r := &m.reclaims
	r.attempts++
	search := m.search(r.attempts, s, now)
	search.evicts = evicts
	r.attempt = &attempt{number: r.attempts, working: true, evicts: evicts, kinds: map[gpu.PodUID]reclaimKind{}}
	for _, u := range units {
		out := reclaim.Unit{Tenant: u.item.Tenant}
		for _, p := range u.pods {
			out.Pods = append(out.Pods, reclaim.Pod{Pod: p.Pod.Pod, Nodes: m.eligibleFor(p.Constraints)})
		}
		search.need.Units = append(search.need.Units, out)
		r.attempt.kinds[u.pods[0].UID] = u.reclaimKind()
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
			if m.units[u.item.ID] != u || m.reclaims.pausing(u, now) || m.obstacle(u) != reasons.ObstacleNoRoom {
				continue
			}
			if pods += len(u.pods); pods > maxReclaim && len(units) > 0 {
				return units
			}
			units = append(units, u)
		}
		if !more {
			return units
		}
	}
}

// Reclaimed records that the caller has finished the evictions of an attempt. made is true if at least one eviction was made or may have
// been made, or none was necessary.
func (m *Manager) Reclaimed(attempt uint64, made bool, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := m.reclaims.attempt
	if a == nil || a.number != attempt {
		return
	}
	a.working = false
	for _, h := range a.held {
		h.evicted = now
	}
	if !made || len(a.held) == 0 {
		for _, kind := range a.kinds {
			m.pauseReclaim(kind, a.evicts && !a.outdated, now)
		}
		m.endAttempt()
	}
}

// pauseReclaim pauses the units of a kind: for longer each time that nothing was achieved although pods could be evicted.
func (m *Manager) pauseReclaim(kind reclaimKind, evicts bool, now time.Time) {
	maps.DeleteFunc(m.reclaims.pauses, func(other reclaimKind, p reclaimPause) bool {
		return other != kind && now.Sub(p.until) > 2*(maxPause+holdLife) // Most have no pods any more.
	})
	last := m.reclaims.pauses[kind]
	if now.Before(last.until) {
		return // Several units of this kind fail at the same time.
	}
	length := minReclaimPause
	if evicts {
		length = min(max(minReclaimPause, 2*last.length), maxPause)
	}
	m.reclaims.pauses[kind] = reclaimPause{now.Add(length), length}
}

// endAttempt ends the attempt, if there is one, and what is held for it.
func (m *Manager) endAttempt() {
	if a := m.reclaims.attempt; a != nil {
		a.working = false
		m.endHolds(func(*heldUnit) bool { return true })
	}
}

// pausing reports whether no attempt may be made for the unit, because the latest one had no success.
func (r *reclaims) pausing(u *unit, now time.Time) bool {
	return now.Before(r.pauses[u.reclaimKind()].until) || now.Before(r.pauses[reclaimKind{tenant: u.item.Tenant}].until)
}

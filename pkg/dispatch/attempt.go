package dispatch

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// attempt is one try of reclaim to make room for units, until its evictions were made or the term ends.
type attempt struct {
	number uint64
	// kinds are the kinds of units that get room. They pause if the attempt fails.
	kinds []reclaimKind
	// resumed are the victims of a former leader's round that still run. Although the caller is about to evict them, or was for a unit that doesn't wait
	// any more, they don't count as being deleted for this attempt.
	resumed map[gpu.PodUID]bool
	// outdated is true if something changed while the plan was made, and the plan could not be used.
	outdated bool
}

// reclaimKind is a kind of units of a tenant, or all of them if kind is zero.
type reclaimKind struct {
	tenant string
	kind   kindKey
}

func (u *unit) reclaimKind() reclaimKind { return reclaimKind{u.item.Tenant, u.kind.kindKey} }

// beginAttempt requests room for the tenants that have been below their share for long enough.
func (m *Manager) beginAttempt(s *standings, starving []starvingTenant, now time.Time) {
	units := m.reclaimUnits(slices.DeleteFunc(slices.Clone(starving), func(s starvingTenant) bool {
		return m.reclaims.below[s.Name] < m.ReclaimAfter
	}), now)
	if len(units) == 0 {
		return
	}
	search := m.search(m.newAttempt().number, s, now)
	for _, u := range units {
		out := reclaim.Unit{Tenant: u.item.Tenant, Item: u.item.ID}
		for _, p := range u.pods {
			out.Pods = append(out.Pods, reclaim.Pod{Pod: p.Pod.Pod})
			search.constraints = append(search.constraints, p.Constraints)
		}
		search.need.Units = append(search.need.Units, out)
		m.reclaims.attempt.kinds = append(m.reclaims.attempt.kinds, u.reclaimKind())
	}
	m.effects.Reclaim = search
}

// newAttempt begins an attempt.
func (m *Manager) newAttempt() *attempt {
	r := &m.reclaims
	r.attempts++
	r.attempt = &attempt{number: r.attempts}
	return r.attempt
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

// Reclaimed records that the caller has made the evictions of an attempt. until is when those that are refused are given up at the latest; zero if
// the evictions have not begun, or none was made.
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

// Justified returns the pods of the attempt for which places are held, and for each of them whether the shares still justify evicting victims whose
// eviction was refused before.
func (m *Manager) Justified(attempt uint64) map[gpu.PodUID]bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	justified := map[gpu.PodUID]bool{}
	for _, h := range m.reclaims.holds {
		for _, place := range h.reservation.Places {
			if h.attempt == attempt {
				justified[place.Pod.UID] = h.justified
			}
		}
	}
	return justified
}

// HeldPlace is the place of a pod that waits: the cards that are held for it.
type HeldPlace struct {
	Pod   gpu.PodUID
	Node  string
	Cards []int
}

// EvictedFor are the pods of a victim, with the pod that waits for which they are evicted.
type EvictedFor struct {
	Pods []gpu.PodUID
	For  gpu.PodUID
}

// Resume holds the places of an attempt of a former leader that has evicted a part of the victims, if that is still right for the others: see
// Hold. It makes the attempt the present one. It reports false if it isn't right, or if it isn't known yet, because there was no round or another
// attempt is in progress.
func (m *Manager) Resume(places []HeldPlace, victims []EvictedFor, now time.Time) (attempt uint64, ok bool) {
	attempt, plan := m.resume(places, victims, now)
	if attempt == 0 {
		return 0, false
	}
	if !m.Hold(attempt, plan, now) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if a := m.reclaims.attempt; a != nil && a.number == attempt {
			m.reclaims.attempt = nil
		}
		return 0, false
	}
	return attempt, true
}

// resume begins an attempt with the plan of a former leader. It returns zero if that isn't possible now.
func (m *Manager) resume(places []HeldPlace, victims []EvictedFor, now time.Time) (attempt uint64, plan reclaim.Plan) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading || m.ReclaimAfter <= 0 || m.now.IsZero() || m.reclaims.attempt != nil {
		return 0, plan
	}
	served := m.servedBy(places, victims)
	if len(served) == 0 {
		return 0, plan
	}
	first := places[0].Pod
	if now.Sub(m.reclaims.resumed[first]) < reclaimInterval {
		return 0, plan
	}
	m.reclaims.resumed[first] = now
	a := m.newAttempt()
	units := map[*unit]reclaim.Unit{}
	for _, s := range served {
		u := m.units[s.Item]
		units[u], a.kinds = s.Unit, append(a.kinds, u.reclaimKind())
	}
	plan.Served = served
	plan.Victims, a.resumed = m.remainingVictims(victims, units)
	return a.number, plan
}

// servedBy returns the units that wait for the places, with the places of all their pods.
func (m *Manager) servedBy(places []HeldPlace, victims []EvictedFor) (served []reclaim.Served) {
	var awaited []gpu.PodUID
	for _, v := range victims {
		awaited = append(awaited, v.Pods...)
	}
	at, listed := map[gpu.PodUID]HeldPlace{}, map[*unit]bool{}
	for _, place := range places {
		at[place.Pod] = place
	}
	for _, place := range places {
		p := m.pods[place.Pod]
		if p == nil || p.unit == nil || listed[p.unit] {
			continue
		}
		listed[p.unit] = true
		s := reclaim.Served{Unit: reclaim.Unit{Tenant: p.unit.item.Tenant, Item: p.unit.item.ID}, Awaited: awaited}
		for _, member := range p.unit.pods {
			place, demand := at[member.UID], member.Demand()
			s.Pods = append(s.Pods, reclaim.Pod{Pod: member.Pod.Pod})
			s.Places = append(s.Places, reclaim.Place{Node: place.Node, On: demand.On(place.Cards...)})
		}
		served = append(served, s)
	}
	return served
}

// remainingVictims returns the victims of the units that still run. resumed are attempt.resumed.
func (m *Manager) remainingVictims(victims []EvictedFor, units map[*unit]reclaim.Unit) (evictions []reclaim.Eviction, resumed map[gpu.PodUID]bool) {
	resumed = map[gpu.PodUID]bool{}
	for _, v := range victims {
		e := reclaim.Eviction{}
		if p := m.pods[v.For]; p != nil {
			e.For = units[p.unit]
		}
		for _, uid := range slices.Sorted(slices.Values(v.Pods)) {
			if p := m.pods[uid]; m.runs(uid) && !p.LeavesSoon() {
				e.Tenant, e.Pods = p.countedFor, append(e.Pods, p.Pod.Pod)
			}
		}
		waits := e.For.Item != ""
		if waits && len(e.Pods) > 0 {
			evictions = append(evictions, e)
		}
		if waits || len(e.Pods) == len(v.Pods) { // Otherwise the rest of a group is evicted although no pod waits for that.
			for _, pod := range e.Pods {
				resumed[pod.UID] = true
			}
		}
	}
	return evictions, resumed
}

// pausing reports whether no attempt may be made for the unit, because the latest one had no success.
func (r *reclaims) pausing(u *unit, now time.Time) bool {
	return r.pauses.Has(u.reclaimKind(), now) || r.pauses.Has(reclaimKind{tenant: u.item.Tenant}, now)
}

package dispatch

import (
	"cmp"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// starvingTenant is a tenant below its share, or one for which places are held.
type starvingTenant struct {
	Tenant
	// has is what is allocated, and what is held.
	has gpu.Memory
	// units are those with which it would still have no more than its share, beside those for which places are held. A tenant that has nothing
	// gets its first one in any case.
	units []*unit
}

// starving returns the tenants below their share that have a unit which lacks only memory, and those for which places are held, in the order of
// their turns.
func (m *Manager) starving(all *standings, now time.Time) (out []starvingTenant) {
	held := m.heldMemory()
	for i, t := range all.tenants {
		s := starvingTenant{Tenant: t, has: t.Allocated.Add(held[t.Name])}
		m.addStarving(&s, all.units[i], now)
		if len(s.units) > 0 || held[t.Name] > 0 {
			out = append(out, s)
		}
	}
	return out
}

// heldMemory returns the memory of the held places by tenant.
func (m *Manager) heldMemory() map[string]gpu.Memory {
	held := map[string]gpu.Memory{}
	for _, h := range m.reclaims.holds {
		held[h.tenant] = held[h.tenant].Add(h.memory)
	}
	return held
}

// countBelow counts for how long the tenants have been below their share. Other time counts down: a moment in which a share is smaller, because
// a pod of another tenant comes and goes, must not make a tenant wait for ReclaimAfter again. Tenants for which places are held count as below
// their share, whatever it is: if they are below it once the hold has ended, this needs no ReclaimAfter again.
func (r *reclaims) countBelow(starving []starvingTenant, atMost time.Duration, now time.Time) {
	passed := now.Sub(cmp.Or(r.counted, now))
	former := r.below
	r.counted, r.below = now, map[string]time.Duration{}
	for name, below := range former {
		if below > passed {
			r.below[name] = below - passed
		}
	}
	for _, s := range starving {
		if below, known := former[s.Name]; known {
			r.below[s.Name] = min(below+passed, atMost)
		} else {
			r.below[s.Name] = 0
		}
	}
}

// addStarving adds the units that lack only memory and fit into the tenant's share beside what it has. A unit that pauses leaves the share to those
// behind it: reclaim may find room for them although it has found none for the unit.
func (m *Manager) addStarving(s *starvingTenant, units []*unit, now time.Time) {
	allocated := s.has
	for _, u := range units {
		first, left := allocated == 0, s.Share.Sub(allocated)
		if left == 0 {
			return
		}
		if u.item.Memory > left && !first || m.hasHold(u) || !m.reclaimable(u, now) {
			continue
		}
		s.units = append(s.units, u)
		if !m.reclaims.pausing(u, now) {
			allocated = allocated.Add(u.item.Memory)
		}
	}
}

// reclaimable reports whether nothing but memory seems to keep the unit from running. One that was not bound after an earlier turn
// counts only much later: others would be evicted for it again and again.
func (m *Manager) reclaimable(u *unit, now time.Time) bool {
	if u.obstacle().Infeasible() {
		return false
	}
	failures, latest := m.Failures.Of(u.profile())
	return failures == 0 || now.Sub(latest) >= m.ReclaimAfter<<min(failures, maxDelays)
}

package dispatch

import (
	"cmp"
	"time"

	"github.com/gpushare/gpushare/pkg/queue"
)

// longestWasted is for how long at most nothing is evicted for items that were not bound after their turn.
const longestWasted = 24 * time.Hour

// starvingTenant is a tenant below its share, or one for which places are held.
type starvingTenant struct {
	Tenant
	// items are those with which it would still have no more than its share, beside those for which places are held. A tenant that has nothing
	// gets its first one in any case.
	items []*item
}

// starving returns the tenants below their share that have an item which lacks only memory, and those for which places are held, in the order of
// their turns.
func (m *Manager) starving(all *standings) (out []starvingTenant) {
	for i, t := range all.tenants {
		held := all.held[t.Name]
		s := starvingTenant{Tenant: t}
		allocated := t.Allocated.Add(held)
		for _, it := range all.items[i] {
			first, left := allocated == 0, t.Share.Sub(allocated)
			if left == 0 {
				break
			}
			if it.Memory > left && !first || m.hasHold(it) || !m.reclaimable(it) {
				continue
			}
			s.items = append(s.items, it)
			if !m.reclaims.pausing(it, m.now) { // Otherwise it leaves the share to those behind it, for which reclaim may find room.
				allocated = allocated.Add(it.Memory)
			}
		}
		if len(s.items) > 0 || held > 0 {
			out = append(out, s)
		}
	}
	return out
}

// reclaimable reports whether nothing but memory seems to keep the item from running. One that was not bound after an earlier turn counts only much
// later, after a time that doubles with each failure: others would be evicted for it again and again.
func (m *Manager) reclaimable(it *item) bool {
	if it.obstacle().Infeasible() {
		return false
	}
	failures, latest := m.Failures.Of(it.profile)
	return failures == 0 || m.now.Sub(latest) >= min(queue.LongestPause<<min(failures-1, 8), longestWasted)
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

package dispatch

import (
	"cmp"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

const (
	// maxReclaim limits the pods for which one attempt makes room: not more than can be granted at one time.
	maxReclaim = maxOpen
	// longestWasted is for how long at most nothing is evicted for items that were not bound after their turn, or of a tenant that withdraws its items.
	longestWasted = 24 * time.Hour
)

// reclaims is the state of reclaiming, guarded by the Manager's lock. At most one attempt is planned at a time, while the victims of others end.
type reclaims struct {
	// since is when this process began to lead.
	since time.Time
	// below is how long each tenant has been below its share with an item that has no room, less the time after that in which it wasn't below its share.
	// It is ReclaimAfter at most. counted is the time up to which it was computed.
	below   map[string]time.Duration
	counted time.Time
	// pauses are those of the kinds for which the latest attempt had no success, and withdrawn those of the tenants that withdrew items after pods had been
	// evicted for these.
	pauses    queue.Pauses[tenantKind]
	withdrawn queue.Pauses[string]
	// search is the one of the attempt in progress; nil if there is none. next is when another attempt may begin after a plan that was outdated.
	search *Search
	next   time.Time
	// holds are by the IDs of their items.
	holds map[string]*hold
}

// tenantKind is a kind of items of a tenant, or all of its items if kind is zero.
type tenantKind struct {
	tenant string
	kind   unique.Handle[string]
}

func (it *item) tenantKind() tenantKind { return tenantKind{it.Tenant, it.kind.key} }

// newReclaims returns the state of a new leader.
func newReclaims() reclaims {
	return reclaims{pauses: queue.Pauses[tenantKind]{}, withdrawn: queue.Pauses[string]{}, holds: map[string]*hold{}}
}

// reclaim requests evictions for tenants below their share, and ends holds that don't help any more.
func (m *Manager) reclaim(s *standings) {
	m.mu.Lock()
	defer m.mu.Unlock()
	starving := m.starving(s)
	m.reclaims.countBelow(starving, m.ReclaimAfter, m.now)
	m.endLateHolds()
	if m.reclaims.search == nil && !m.now.Before(m.reclaims.next) && m.MayEvict() {
		m.beginAttempt(s, starving)
	}
}

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
	failures, latest := m.Failures.CountOf(it.profile)
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

// beginAttempt requests room for the tenants that have been below their share for long enough. An attempt is one try to make room for items, from then
// until Reclaimed.
func (m *Manager) beginAttempt(s *standings, starving []starvingTenant) {
	items := m.reclaimItems(starving)
	if len(items) == 0 {
		return
	}
	search := m.search(s)
	for _, it := range items {
		needs := searchedItem{tenantKind: it.tenantKind(), id: it.ID}
		for _, p := range it.pods {
			needs.pods = append(needs.pods, p.Pod)
		}
		search.wanted = append(search.wanted, needs)
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
			if m.items[it.ID] != it || m.reclaims.pausing(it, m.now) || it.obstacle() != reasons.ObstacleNoRoom || it.kind.isDue(m.now) {
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

// pause pauses a tenant, or its items of one kind, after an attempt without success, for longer each time.
func pause[K comparable](pauses queue.Pauses[K], key K, now time.Time, most time.Duration) {
	pauses.Prune(now, most) // Most have no pods any more.
	if pauses.Has(key, now) {
		return // Several items fail at the same time.
	}
	pauses.Extend(key, now, queue.Retry, most)
}

// pausing reports whether no attempt may be made for the item, because the latest one had no success.
func (r *reclaims) pausing(it *item, now time.Time) bool {
	return r.pauses.Has(it.tenantKind(), now) || r.pauses.Has(tenantKind{tenant: it.Tenant}, now) || r.withdrawn.Has(it.Tenant, now)
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
		m.endHolds((*hold).isEvicting)
	}
	held := map[tenantKind]bool{}
	for _, h := range m.reclaims.holds {
		if h.isEvicting() {
			h.ends, held[h.tenantKind] = until, held[h.tenantKind] || m.itemOf(h) != nil
		}
	}
	for _, it := range s.wanted {
		if !held[it.tenantKind] {
			pause(m.reclaims.pauses, it.tenantKind, m.now, queue.LongestPause)
		}
	}
}

package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/queue"
)

// maxReclaim limits the pods for which one attempt makes room: not more than can be granted at one time.
const maxReclaim = maxOpen

// reclaims is the state of reclaiming, guarded by the Manager's lock. At most one attempt is planned at a time, while the victims of others end.
type reclaims struct {
	// since is when this process began to lead.
	since time.Time
	// below is how long each tenant has been below its share with an item that has no room, less the time since in which it wasn't; ReclaimAfter
	// at most. counted is up to when.
	below   map[string]time.Duration
	counted time.Time
	// pauses are those of the kinds for which the latest attempt had no success.
	pauses queue.Pauses[tenantKind]
	// search is the one of the attempt in progress; nil if there is none. next is when another attempt may begin after a plan that was outdated.
	search *Search
	next   time.Time
	// holds are by the IDs of their items.
	holds map[string]*hold
}

// newReclaims returns the state of a new leader.
func newReclaims() reclaims {
	return reclaims{pauses: queue.Pauses[tenantKind]{}, holds: map[string]*hold{}}
}

// reclaim requests evictions for tenants below their share, and ends holds that don't help any more.
func (m *Manager) reclaim(s *standings) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading {
		return
	}
	starving := m.starving(s)
	m.reclaims.countBelow(starving, m.ReclaimAfter, m.now)
	m.endLateHolds()
	if m.reclaims.search == nil && !m.now.Before(m.reclaims.next) && m.MayEvict() {
		m.beginAttempt(s, starving)
	}
}

// pause pauses a tenant's items of one kind after an attempt without success, for longer each time.
func (r *reclaims) pause(kind tenantKind, now time.Time) {
	r.pauses.Prune(now, queue.LongestPause) // Most have no pods any more.
	if r.pauses.Has(kind, now) {
		return // Several items of this kind fail at the same time.
	}
	r.pauses.Extend(kind, now, queue.Retry, queue.LongestPause)
}

// pausing reports whether no attempt may be made for the item, because the latest one had no success.
func (r *reclaims) pausing(it *item, now time.Time) bool {
	return r.pauses.Has(it.tenantKind(), now) || r.pauses.Has(tenantKind{tenant: it.Tenant}, now)
}

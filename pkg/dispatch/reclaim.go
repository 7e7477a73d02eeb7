package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/queue"
)

const (
	// reclaimInterval is the interval between two searches for tenants below their share and for contested regions.
	reclaimInterval = time.Second
	// maxReclaim limits the pods for which one attempt makes room: not more than can be granted at one time.
	maxReclaim = maxOpen
	// maxWastedPause is the longest pause of a tenant's units of one kind after pods were evicted for one that then wasn't bound.
	maxWastedPause = 24 * time.Hour
	// maxDelays limits how often a unit's wait for a reclaim doubles because it wasn't bound after its turn.
	maxDelays = 6
)

// reclaims is the state of reclaiming, guarded by the Manager's lock. At most one attempt is planned at a time, while the victims of others end.
type reclaims struct {
	checked time.Time
	// since is when this process began to lead.
	since time.Time
	// below is how long each tenant has been below its share with a unit that has no room, less the time since in which it wasn't; ReclaimAfter
	// at most. counted is up to when.
	below   map[string]time.Duration
	counted time.Time
	// pauses are those of the kinds for which the latest attempt had no success. wastes are the latest pauses of each tenant because a unit for which
	// pods were evicted wasn't bound.
	pauses queue.Pauses[pauseKey]
	wastes queue.Pauses[string]
	// attempts counts the attempts. attempt is the one that is planned, or whose evictions are made; nil if there is none.
	attempts uint64
	attempt  *attempt
	// holds are by the IDs of their units.
	holds map[string]*hold
}

// newReclaims returns the state of a new leader. attempts is how many this process has made before: a late result of one of these
// must not be taken for that of a new one.
func newReclaims(attempts uint64) reclaims {
	return reclaims{
		attempts: attempts, pauses: queue.Pauses[pauseKey]{}, wastes: queue.Pauses[string]{},
		holds: map[string]*hold{},
	}
}

// useStandings records which regions are contested. With reclaim it also requests evictions for tenants below their share, and ends holds that don't
// help any more.
func (m *Manager) useStandings(s *standings, now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading {
		return
	}
	m.contested = s.contested()
	if m.ReclaimAfter <= 0 {
		return
	}
	starving := m.starving(s, now)
	m.reclaims.countBelow(starving, m.ReclaimAfter, now)
	m.updateHolds(now)
	if m.reclaims.attempt == nil && m.MayEvict() {
		m.beginAttempt(s, starving, now)
	}
}

// dueStandings returns the state of the tenants once every reclaimInterval, else nil. It doesn't share its hold of the lock
// with a round: both take milliseconds in a large cluster. What changed after the round can have taken the pods of a group out of their
// unit, so units of groups are made again.
func (m *Manager) dueStandings(now time.Time) *standings {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading {
		return nil
	}
	if m.reclaims.since.IsZero() {
		m.reclaims.since = now
	}
	if now.Sub(m.reclaims.checked) < reclaimInterval {
		return nil
	}
	m.reclaims.checked = now
	m.gatherGroups()
	return m.takeStandings()
}

// pause pauses a tenant's units of one kind after an attempt without success: for longer each time, unless something changed while the plan was made.
func (r *reclaims) pause(kind pauseKey, doubles bool, now time.Time) {
	r.pauses.Prune(now, queue.LongestPause) // Most have no pods any more.
	if r.pauses.Has(kind, now) {
		return // Several units of this kind fail at the same time.
	}
	if !doubles {
		delete(r.pauses, kind)
	}
	r.pauses.Extend(kind, now, queue.Retry, queue.LongestPause)
}

// recordWaste records that a unit wasn't bound although its places were held until others had ended. The tenant's units of its kind pause, for twice
// as long after each such failure of the tenant: a controller can replace the pods.
func (r *reclaims) recordWaste(g *grant, now time.Time) {
	kind := g.madeRoom
	g.madeRoom = pauseKey{}
	if kind == (pauseKey{}) || r.pausesForWaste(kind, now) {
		return // No places were held for it, or several units of this kind fail at the same time.
	}
	r.wastes.Prune(now, maxWastedPause)
	r.wastes.Extend(kind.tenant, now, queue.LongestPause, maxWastedPause)
	r.pauses[kind] = r.wastes[kind.tenant]
}

// pausesForWaste reports whether the kind's present pause is the one that the tenant's latest waste began.
func (r *reclaims) pausesForWaste(kind pauseKey, now time.Time) bool {
	return r.wastes.Has(kind.tenant, now) && r.pauses[kind] == r.wastes[kind.tenant]
}

// recordArrival records that a pod of a unit was bound: if its places were held, that was of use.
func (r *reclaims) recordArrival(g *grant) {
	if g.madeRoom != (pauseKey{}) {
		delete(r.wastes, g.madeRoom.tenant)
		delete(r.pauses, g.madeRoom)
		g.madeRoom = pauseKey{}
	}
}

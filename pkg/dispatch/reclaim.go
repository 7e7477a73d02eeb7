package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

const (
	// reclaimInterval is the interval between two searches for tenants below their share.
	reclaimInterval = time.Second
	// maxReclaim limits the pods for which one attempt makes room: not more than can be granted at one time.
	maxReclaim = maxOpen
	// maxAttempts limits the attempts whose victims have not ended. It is the limit of the executor of evictions.
	maxAttempts = 16
	// freedLife is how long places are held after the victims have ended.
	freedLife = 10 * time.Second
	// minReclaimPause is the pause of a tenant's units of one kind after an attempt without success; it doubles each time, up to maxPause,
	// unless something changed while the plan was made.
	minReclaimPause = 10 * time.Second
	// maxDelays limits how often a unit's wait for a reclaim doubles because it wasn't bound after its turn.
	maxDelays = 6
)

// reclaims is the state of reclaiming, guarded by the Manager's lock. At most one attempt is planned at a time, while the victims of others end.
// A new leader gets the former leader's attempts by Resume.
type reclaims struct {
	checked time.Time
	// since is when this process began to lead.
	since time.Time
	// below is how long each tenant has been below its share with a unit that has no room, less the time since in which it wasn't; ReclaimAfter
	// at most. counted is up to when.
	below    map[string]time.Duration
	counted  time.Time
	pauses   map[reclaimKind]reclaimPause
	attempts uint64
	// attempt is the one that is planned, or whose evictions are made; nil if there is none. held are the units for which places are held,
	// heldFor the same by their pods. ending are the victims for them, with the number of the attempt: they count as being deleted.
	attempt *attempt
	held    []*heldUnit
	heldFor map[gpu.PodUID]*heldUnit
	ending  map[gpu.PodUID]uint64
	// resumed is when Resume was last tried.
	resumed time.Time
	// charged is the memory of held places that the queue counts, by tenant. Without it, later pods of the tenant would be granted
	// memory that belongs to its share and is held for its earlier pods.
	charged map[string]gpu.Memory
}

// newReclaims returns the state of a new leader. attempts is how many this process has made before: a late result of one of these
// must not be taken for that of a new one.
func newReclaims(attempts uint64) reclaims {
	return reclaims{attempts: attempts, pauses: map[reclaimKind]reclaimPause{}, ending: map[gpu.PodUID]uint64{}}
}

// reclaimFor requests evictions for tenants below their share, and ends holds that don't help any more.
func (m *Manager) reclaimFor(s *standings, now time.Time) {
	preferences := m.steer(s)
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading {
		return
	}
	if m.regions == s.regions { // Other regions may not know all constraints of the pods that wait.
		m.preferences = preferences
	}
	starving := m.starving(s, now)
	m.reclaims.countBelow(starving, m.ReclaimAfter, now)
	m.endFailedHolds(starving, now)
	if m.reclaims.attempt == nil && m.reclaims.inProgress() < maxAttempts {
		m.beginAttempt(s, starving, now)
	}
}

// dueStandings returns the state of the tenants if it is time to search for those below their share; else nil.
func (m *Manager) dueStandings(now time.Time) *standings {
	if m.reclaims.since.IsZero() {
		m.reclaims.since = now
	}
	if m.ReclaimAfter <= 0 || now.Sub(m.reclaims.checked) < reclaimInterval {
		return nil
	}
	m.reclaims.checked = now
	return m.standings()
}

// inProgress counts the attempts for which places are held.
func (r *reclaims) inProgress() int {
	numbers := map[uint64]bool{}
	for _, h := range r.held {
		numbers[h.attempt] = true
	}
	return len(numbers)
}

package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

const (
	// reclaimInterval is the interval at which tenants below their share are looked for.
	reclaimInterval = time.Second
	// maxReclaim limits the pods that get room by one attempt: not more than can be granted at one time.
	maxReclaim = maxOpen
	// holdLife is how long places are held for pods whose victims don't end, freedLife for how long after the victims are gone.
	holdLife, freedLife = 10 * time.Minute, 10 * time.Second
	// evictionLag is how long after an attempt the watch must show that the victims are being deleted.
	evictionLag = time.Minute
	// minReclaimPause is the pause of a tenant's units of one kind after an attempt without success; it doubles each time, up to maxPause,
	// unless something changed while the plan was made.
	minReclaimPause = 10 * time.Second
	// maxDelays limits how often a unit's wait for a reclaim doubles because it wasn't bound after its turn.
	maxDelays = 6
)

// reclaims is the state of reclaiming, guarded by the Manager's lock. At most one attempt is made at a time. A new leader forgets
// what the former one did, and sees it in the pods that are being deleted.
type reclaims struct {
	checked time.Time
	// since is when this process began to lead.
	since time.Time
	// below is since when each tenant has been below its share with a unit that has no room, or that was granted without a place.
	below    map[string]time.Time
	pauses   map[reclaimKind]reclaimPause
	attempts uint64
	// attempt is nil if none is in progress.
	attempt *attempt
	// charged is what the queue counts for the places that are held, by tenant: it isn't the turn of a tenant's later pods for what
	// the held ones will have.
	charged map[string]gpu.Memory
	// moved is when pods of each tenant were last evicted that left it with less than its share: it gets other room at once.
	moved map[string]time.Time
}

// newReclaims returns the state of a new leader. attempts is how many this process has made before: a late result of one of these
// must not be taken for that of a new one.
func newReclaims(attempts uint64) reclaims {
	return reclaims{attempts: attempts, pauses: map[reclaimKind]reclaimPause{}, moved: map[string]time.Time{}}
}

// reclaim looks for tenants below their share, and requests what makes room for them.
func (m *Manager) reclaim(now time.Time) {
	if m.reclaims.since.IsZero() {
		m.reclaims.since = now
	}
	if m.ReclaimAfter <= 0 || now.Sub(m.reclaims.checked) < reclaimInterval {
		return
	}
	m.reclaims.checked = now
	tenants, units := m.standings()
	m.steer(units)
	starving := m.starving(tenants, units, now)
	m.endFailedHolds(starving, now)
	if m.reclaims.attempt == nil {
		m.beginAttempt(tenants, units, starving, now)
	}
}

package dispatch

import (
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// checkInterval is the time between two looks at the tenants' shares, and roundInterval that between two rounds without a change.
const checkInterval, roundInterval = time.Second, 100 * time.Millisecond

// Tick ends charges that have lasted too long, and grants what fits. Only the leader may call it, several times a second, once
// the cache is synced.
func (m *Manager) Tick(now time.Time) {
	m.grantDue(now)
	if s := m.dueStandings(); s != nil {
		m.setShares(s)
		m.reclaim(s)
	}
}

// grantDue ends charges, makes a round if it can help, and requests the writes that open gates.
func (m *Manager) grantDue(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now = now
	if m.reclaims.since.IsZero() {
		m.reclaims.since = now
	}
	m.expire()
	m.endKept(func(k *kept) bool { return !now.Before(k.until) })
	freed, tooMany := m.freed.take()
	if tooMany {
		m.changed = true
		for _, k := range m.kinds {
			k.retryAt = time.Time{}
		}
	}
	if m.changed || len(m.unfinished) > 0 || len(freed) > 0 || now.Sub(m.roundAt) >= roundInterval {
		m.makeRound(freed)
	}
	m.openGates()
}

// dueStandings does once every checkInterval what isn't part of a round: it opens gates for an autoscaler, and returns the state of the tenants for
// reclaim; else nil. It doesn't share its hold of the lock with a round: both take milliseconds in a large cluster. What changed after the round can
// have taken the pods of a group out of their item, so items of groups are made again.
func (m *Manager) dueStandings() *standings {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading || m.now.Sub(m.checked) < checkInterval {
		return nil
	}
	m.checked = m.now
	m.provision()
	m.openGates()
	if m.ReclaimAfter == 0 {
		return nil
	}
	m.gatherGroups()
	return m.takeStandings()
}

// updatePause records whether the item must not be granted because it, or others of its namespace, failed. awaits is true if it has an awaited
// reservation.
func (m *Manager) updatePause(it *item, awaits bool) {
	before := it.pause
	it.pause = 0
	if until, behind := m.Failures.PauseUntil(it.profile, awaits, m.now); until.After(m.now) {
		it.pause = reasons.ObstaclePaused
		if behind {
			it.pause = reasons.ObstacleBehindFailed
		}
	}
	if before != 0 && it.pause == 0 {
		it.kind.retryAt = time.Time{} // Nodes on which something was freed meanwhile were tried without it.
	}
}

// maxFreed is the largest number of freed nodes that are listed. If there are more, items are tried on all nodes.
const maxFreed = 64

// freedNodes are nodes on which items may have got room. mu guards names. No other lock is taken while it is held.
type freedNodes struct {
	mu    sync.Mutex
	names []string
}

func (f *freedNodes) add(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.names) <= maxFreed && !slices.Contains(f.names, name) {
		f.names = append(f.names, name)
	}
}

// take removes and returns the nodes. tooMany is true if there are too many to list.
func (f *freedNodes) take() (names []string, tooMany bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	names, f.names = f.names, nil
	if len(names) > maxFreed {
		return nil, true
	}
	return names, false
}

package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/reasons"
)

const (
	// checkInterval is the time between two looks at the tenants' shares, and roundInterval that between two rounds without a change.
	checkInterval, roundInterval = time.Second, 100 * time.Millisecond
	// maxEffort limits the attempts of one round to reserve places, because event handlers wait for the end of the round. The next Tick continues a
	// round that reached the limit. An attempt on all nodes counts as one, and comparing all nodes with constraints as constraintsEffort for each
	// KiB of them. A tenant gets maxTenantEffort at most, and less if several tenants are cut short, so that other tenants don't wait for thousands
	// of its pods that all differ.
	maxEffort, maxTenantEffort, constraintsEffort = 1024, maxEffort / 2, 128
)

// Tick ends charges that have lasted too long, and grants what fits. Only the leader may call it, several times a second, once
// the cache is synced.
func (m *Manager) Tick(now time.Time) {
	m.grantDue(now)
	if s := m.dueStandings(); s != nil {
		m.setShares(s)
		m.useStandings(s)
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
	m.endKept()
	freed, tooMany := m.freed.take()
	if changes := m.nodeChanges.Load(); changes != m.seenChanges || tooMany {
		m.seenChanges, m.changed = changes, true
		m.retryAll()
	}
	if m.changed || m.progress.incomplete() || len(freed) > 0 || now.Sub(m.progress.at) >= roundInterval {
		m.makeRound(freed)
	}
	if m.isCheckDue() {
		m.provision()
	}
	m.openGates()
}

// retryAll makes all kinds due in the next round.
func (m *Manager) retryAll() {
	m.kinds.retry()
	m.progress.changedAt = m.progress.rounds + 1
}

// isCheckDue reports whether checkInterval has passed.
func (m *Manager) isCheckDue() bool { return m.now.Sub(m.checked) >= checkInterval }

// dueStandings returns the state of the tenants for reclaim once every checkInterval, else nil. It doesn't share its hold of the lock with a round: both take
// milliseconds in a large cluster. What changed after the round can have taken the pods of a group out of their item, so items of groups are made
// again.
func (m *Manager) dueStandings() *standings {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading || !m.isCheckDue() {
		return nil
	}
	m.checked = m.now
	if m.ReclaimAfter == 0 {
		return nil
	}
	m.gatherGroups()
	return m.takeStandings()
}

// useStandings requests evictions for tenants below their share, and ends holds that don't help any more.
func (m *Manager) useStandings(s *standings) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.leading {
		m.reclaim(s)
	}
}

// updatePause records whether the item must not be granted because it, or others of its namespace, failed. awaits is true if it has an awaited
// reservation.
func (m *Manager) updatePause(it *item, awaits bool) {
	before := it.pause
	it.pause = 0
	if until, behind := m.Failures.Wait(it.profile, awaits, m.now); until.After(m.now) {
		it.pause = reasons.ObstaclePaused
		if behind {
			it.pause = reasons.ObstacleBehindFailed
		}
	}
	if before != 0 && it.pause == 0 {
		it.kind.retryAt = time.Time{} // Nodes on which something was freed meanwhile were tried without it.
	}
}

package dispatch

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
)

// maxEffort limits the attempts of one round to reserve places on all nodes, because event handlers wait for the end of the round. The next Tick tries
// the units that a round has passed over for it.
const maxEffort = 1024

// Tick ends charges that have lasted too long, and grants what fits. Only the leader may call it, several times a second, once
// the cache is synced.
func (m *Manager) Tick(now time.Time) {
	m.grantDue(now)
	m.match()
	if s := m.dueStandings(now); s != nil {
		m.setShares(s)
		m.reclaimFor(s, now)
	}
}

// grantDue ends charges, makes a round if it can help, and requests the writes that open gates.
func (m *Manager) grantDue(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now = now
	m.expire(now)
	m.endKept(now)
	m.forgetOutdated(now)
	freed := m.takeFreed()
	retries := m.retry(now)
	if m.changed || m.incomplete() || m.pauseEnded(now) || len(m.units)+len(m.members) > 0 && (retries || len(freed) > 0) {
		m.round(freed, now)
	}
	if retries {
		m.letThrough(now)
	}
	m.openGates(now)
}

// forgetOutdated drops what was computed from nodes that have changed since, and results that are too old.
func (m *Manager) forgetOutdated(now time.Time) {
	m.feasible.expire(now)
	if changes := m.nodeChanges.Load(); changes != m.seenChanges {
		m.seenChanges, m.regions = changes, nil
		clear(m.feasible.results)
		m.retryAll = time.Time{}
	}
}

// takeFreed returns the nodes on which resources were freed since the latest Tick. If there are many, all nodes are tried.
func (m *Manager) takeFreed() []string {
	freed, tooMany := m.freed.take()
	if tooMany {
		m.retryAll = time.Time{}
	}
	return slices.Sorted(maps.Keys(freed)) // Of equally good nodes the ledger takes the first.
}

// retry makes all kinds be tried on all nodes again each queue.Retry, and after a change that can help any of them. It reports whether they are. If a
// round was exhausted, the units that it has passed over come first: otherwise the last ones would never get their turn.
func (m *Manager) retry(now time.Time) bool {
	if m.exhausted || now.Before(m.retryAll) {
		return false
	}
	m.kinds.retry()
	m.retryAll = now.Add(queue.Retry)
	return true
}

// round grants what fits, in the order of the queue.
func (m *Manager) round(freed []string, now time.Time) {
	m.changed, m.freedNow = false, freed
	m.gatherGroups()
	m.grantHeld(now)
	m.keepEnded(now)
	m.rounds, m.effort, m.exhausted = m.rounds+1, 0, false
	m.grantInOrder(m.capacity(true), now)
}

// incomplete reports whether the latest round has not tried all units.
func (m *Manager) incomplete() bool { return m.exhausted || len(m.unmatched) > 0 }

// capacity returns a new count of what nodes have free besides GPU memory; nil if nothing else counts.
func (m *Manager) capacity(withHeld bool) ledger.Capacity {
	if m.Capacity == nil {
		return nil
	}
	return m.Capacity(withHeld)
}

// pause records whether the unit must not be granted because it, or others of its namespace, failed.
func (m *Manager) pause(u *unit, now time.Time) {
	before := u.paused
	until, turn := m.Failures.Until(u.attempt(), now)
	if u.paused, u.behindFailed = until.After(now), turn; u.paused && (m.pausedUntil.IsZero() || until.Before(m.pausedUntil)) {
		m.pausedUntil = until
	}
	if before && !u.paused {
		u.kind.tried = false // Nodes on which something was freed meanwhile were tried without it.
	}
}

// pauseEnded reports whether the pause of a unit ended since the latest round.
func (m *Manager) pauseEnded(now time.Time) bool {
	return !m.pausedUntil.IsZero() && !now.Before(m.pausedUntil)
}

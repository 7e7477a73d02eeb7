package dispatch

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

const (
	// All pods are tried on all nodes again each queue.Retry, even without a change that could help. A round tries at least
	// leastRetries of their kinds, and at least a part of 1/retryRounds, which takes about half of the interval.
	leastRetries, retryRounds = 4, 125
	// maxEffort limits the attempts of one round to reserve places, because event handlers wait for the end of the round. The next Tick
	// continues a round that reached the limit. An attempt on all nodes counts as one, and comparing all nodes with constraints as
	// constraintsEffort for each KiB of them. A tenant gets ownEffort at most, and less if several tenants are cut short, so that other
	// tenants don't wait for thousands of its pods that all differ. Its next round spends half of that on its first units, and the rest on those that have not had their turn yet.
	maxEffort, ownEffort, constraintsEffort = 1024, maxEffort / 2, 128
)

// Tick ends charges that have lasted too long, and grants what fits. Only the leader may call it, several times a second, once
// the cache is synced.
func (m *Manager) Tick(now time.Time) {
	m.grantDue(now)
	if s := m.dueStandings(now); s != nil {
		m.setShares(s)
		m.useStandings(s, now)
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
	all, some := m.retry(now)
	if m.changed || m.incomplete() || m.pauseEnded(now) || len(m.units)+len(m.members) > 0 && (all || some || len(freed) > 0) {
		m.round(all, freed, now)
	}
	m.openGates(now)
}

// forgetOutdated drops what was computed from nodes that have changed since, and results that are too old.
func (m *Manager) forgetOutdated(now time.Time) {
	changes := m.nodeChanges.Load()
	if changes != m.seenChanges {
		m.seenChanges, m.retryAll = changes, time.Time{}
	} else if now.Before(m.feasibleUntil) {
		return
	}
	m.feasibleUntil = now.Add(feasibleFor)
	m.kinds.forgetFeasible()
}

// takeFreed returns the nodes on which resources were freed since the latest Tick. If there are many, all nodes are tried.
func (m *Manager) takeFreed() []string {
	freed, tooMany := m.freed.take()
	if tooMany {
		m.retryAll = time.Time{}
		return nil
	}
	return slices.Sorted(maps.Keys(freed)) // Of equally good nodes the ledger takes the first.
}

// retry selects kinds without room that are tried on all nodes again. Every queue.Retry all such kinds become due. A part of them is tried
// in each round; after a change that can help any of them, all are tried at once. all is true if they have become due now, some if there
// are any for this round. A round that was exhausted goes on first: otherwise its last units would never get their turn.
func (m *Manager) retry(now time.Time) (all, some bool) {
	if m.exhausted {
		return false, false
	}
	atOnce := m.retryAll.IsZero()
	if all = !now.Before(m.retryAll); all {
		m.due = m.kinds.tried()
		slices.SortFunc(m.due, func(a, b *kind) int { return a.compare(b.kindKey) })
		m.retries = max(leastRetries, len(m.due)/retryRounds)
		m.retryAll = now.Add(queue.Retry)
	}
	n := min(len(m.due), m.retries)
	if atOnce {
		n = len(m.due)
	}
	for _, kind := range m.due[:n] {
		kind.obstacle = reasons.ObstacleUntried
	}
	m.due = m.due[n:]
	return all, n > 0
}

// round grants what fits, in the order of the queue. all is true if all nodes are tried, not only those on which something was freed.
func (m *Manager) round(all bool, freed []string, now time.Time) {
	m.changed, m.freedNow, m.missed = false, slices.Compact(slices.Sorted(slices.Values(append(freed, m.missed...)))), nil
	m.gatherGroups()
	m.grantHeld(now)
	m.keepEnded(now)
	capacity := m.Capacity(true)
	if m.rounds, m.effort = m.rounds+1, 0; len(freed) > 0 {
		m.freedAt = m.rounds
	}
	m.grantInOrder(capacity, now)
	if all {
		m.letThrough(now)
	}
	if m.incomplete() {
		m.missed = m.freedNow
	}
	if len(m.missed) > maxFreed {
		m.retryAll, m.missed = time.Time{}, nil
	}
}

// incomplete reports whether the latest round has not tried all units.
func (m *Manager) incomplete() bool { return m.exhausted || len(m.cutShort) > 0 }

// pause records whether the unit must not be granted because it, or others of its namespace, failed.
func (m *Manager) pause(u *unit, now time.Time) {
	before := u.paused
	until, turn := m.Failures.Until(u.attempt(), now)
	if u.paused, u.behindFailed = until.After(now), turn; u.paused && (m.pausedUntil.IsZero() || until.Before(m.pausedUntil)) {
		m.pausedUntil = until
	}
	if before && !u.paused {
		u.kind.obstacle = reasons.ObstacleUntried // Nodes on which something was freed meanwhile were tried without it.
	}
}

// pauseEnded reports whether the pause of a unit ended since the latest round.
func (m *Manager) pauseEnded(now time.Time) bool {
	return !m.pausedUntil.IsZero() && !now.Before(m.pausedUntil)
}

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
	// leastRetries of their kinds, and at least 1/retryRounds of them: with several rounds a second, all are tried in about half of the interval.
	leastRetries, retryRounds = 4, 125
	// maxEffort limits the attempts of one round to reserve places, because event handlers wait for the end of the round. The next Tick continues a
	// round that reached the limit. An attempt on all nodes counts as one, and comparing all nodes with constraints as constraintsEffort for each
	// KiB of them. A tenant gets maxTenantEffort at most, and less if several tenants are cut short, so that other tenants don't wait for thousands
	// of its pods that all differ. Its next round spends half of that on its first units, and the rest on those that have not had their turn yet.
	maxEffort, maxTenantEffort, constraintsEffort = 1024, maxEffort / 2, 128
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
	waiting := len(m.units)+len(m.members) > 0
	if m.changed || m.progress.incomplete() || m.progress.pauseEnded(now) || waiting && (all || some || len(freed) > 0) {
		m.makeRound(all, freed, now)
	}
	m.openGates(now)
}

// forgetOutdated drops what was computed from nodes that have changed since, and results that are too old.
func (m *Manager) forgetOutdated(now time.Time) {
	changes := m.nodeChanges.Load()
	if changes != m.seenChanges {
		m.seenChanges, m.retries.allAt = changes, time.Time{}
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
		m.retries.allAt = time.Time{}
		return nil
	}
	return slices.Collect(maps.Keys(freed))
}

// retries are the kinds of units without room that are tried on all nodes again.
type retries struct {
	// due are those whose retry is due, perRound of them in each round. At allAt, all kinds without room become due.
	due      []*kind
	perRound int
	allAt    time.Time
}

// retry selects kinds without room that are tried on all nodes again. Every queue.Retry all such kinds become due. A part of them is tried
// in each round; after a change that can help any of them, all are tried at once. all is true if they have become due now, some if there
// are any for this round. A round that was exhausted goes on first: otherwise its last units would never get their turn.
func (m *Manager) retry(now time.Time) (all, some bool) {
	if m.progress.exhausted {
		return false, false
	}
	r := &m.retries
	atOnce := r.allAt.IsZero()
	all = !now.Before(r.allAt)
	if all {
		r.due = m.kinds.tried()
		slices.SortFunc(r.due, func(a, b *kind) int { return a.compare(b.kindKey) })
		r.perRound = max(leastRetries, len(r.due)/retryRounds)
		r.allAt = now.Add(queue.Retry)
	}
	n := min(len(r.due), r.perRound)
	if atOnce {
		n = len(r.due)
	}
	for _, kind := range r.due[:n] {
		kind.obstacle = reasons.ObstacleUntried
	}
	r.due = r.due[n:]
	return all, n > 0
}

// updatePause records whether the unit must not be granted because it, or others of its namespace, failed.
func (m *Manager) updatePause(u *unit, now time.Time) {
	before := u.paused
	until, behind := m.Failures.Wait(u.profile(), m.Ledger.HasAwaited(u.item.ID), now)
	u.paused, u.behindFailed = until.After(now), behind
	if first := m.progress.pausedUntil; u.paused && (first.IsZero() || until.Before(first)) {
		m.progress.pausedUntil = until
	}
	if before && !u.paused {
		u.kind.obstacle = reasons.ObstacleUntried // Nodes on which something was freed meanwhile were tried without it.
	}
}

package gang

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// rank updates the item and the failures of a run, after a change of its phase, members or failures.
func (mgr *Manager) rank(r *run) {
	r.item = ledger.Item{
		ID: r.key.ItemID(), Label: "group " + r.key.String(), CompletesGroup: r.counts[bound] > 0, Priority: r.priority(), Entered: r.created,
	}
	r.failures = 0
	if r.phase.isStarting() && mgr.Failures.Any(r.key.Namespace) {
		var latest time.Time
		r.failures, latest = mgr.Failures.Of(mgr.profile(r))
		if latest.After(r.created) {
			r.item.Entered = latest.Truncate(time.Second) // As times of creation are.
		}
	}
}

func compareRank(a, b *run) int { return a.item.Compare(&b.item) }

// unfinished returns the runs that aren't in PhaseRunning, in the order of the queue.
func (mgr *Manager) unfinished() (out []*run) {
	for _, g := range mgr.groups {
		if r := g.unfinishedRun(); r != nil {
			out = append(out, r)
		}
	}
	slices.SortFunc(out, compareRank)
	return out
}

package gang

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// runList is a list of runs in the order of the queue. The item of a run must not change while it is on a list: see reorder.
type runList []*run

func (l *runList) find(r *run) (int, bool) {
	return slices.BinarySearchFunc(*l, &r.item, func(o *run, item *ledger.Item) int { return o.item.Compare(item) })
}

func (l *runList) insert(r *run) {
	i, _ := l.find(r)
	*l = slices.Insert(*l, i, r)
}

func (l *runList) remove(r *run) {
	if i, found := l.find(r); found && (*l)[i] == r {
		*l = slices.Delete(*l, i, i+1)
	}
}

// reorder moves the run to the list and the position that follow from its phase, members and failures.
func (mgr *Manager) reorder(r *run) {
	mgr.waiting.remove(r)
	mgr.placed.remove(r)
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
	switch r.phase {
	case PhasePending, PhaseBroken:
		if r.enough() {
			mgr.waiting.insert(r)
		}
	case PhasePlanned:
		mgr.placed.insert(r)
	}
}

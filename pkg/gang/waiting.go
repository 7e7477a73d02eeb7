package gang

import (
	"slices"
	"strconv"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Waiting returns the runs that have no plan although only memory or other resources seem to be missing, as items of the queue. Those that
// wait for their turn by fair sharing aren't among them: package dispatch returns these.
func (mgr *Manager) Waiting(now time.Time) (items []queue.Item) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for _, r := range mgr.waiting {
		paused, _ := mgr.paused(r, now)
		if r.plan != nil || paused || r.needed().any(mgr.AwaitsTurn) || !r.onlyLacksResources(now) {
			continue
		}
		items = append(items, queue.Item{
			Item: r.item, Like: r.like(), Attempt: mgr.attempt(r),
			Requests: func() []ledger.Request { return mgr.waitingRequests(r) },
		})
	}
	return items
}

// like returns Item.Like: equal for runs that fit the same free resources, as far as that is known.
func (r *run) like() string {
	if likeness := r.needed().likeness; likeness != "" {
		return likeness + " " + strconv.Itoa(int(r.priority()))
	}
	return r.item.ID
}

// onlyLacksResources reports whether a lack of memory or other resources is the only known reason why the members are pending.
func (r *run) onlyLacksResources(now time.Time) bool {
	short := map[string]bool{} // By template; members with volumes have one each.
	for _, m := range r.ordered() {
		if m.ShortOfResources && m.counted == pending {
			short[m.Template] = true
		}
	}
	return !slices.ContainsFunc(r.needed().members, func(m *member) bool {
		o := r.offers[m.Template]
		return !short[m.Template] && (r.wait != reasons.GroupNoRoom || o == nil || now.Sub(o.at) > queue.KubeSchedulerRetries)
	})
}

// waitingRequests returns the requests of the members that the run still needs, with all their eligible nodes.
func (mgr *Manager) waitingRequests(r *run) (requests []ledger.Request) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	for _, m := range r.needed().members {
		if m.Request > 0 {
			requests = append(requests, ledger.Request{Pod: m.Pod, Nodes: mgr.EligibleNodes(m.UID)})
		}
	}
	return requests
}

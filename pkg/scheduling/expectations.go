package scheduling

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/arrivals"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// minCostly and maxCostly bound the time between two computations about all pods or nodes, which take milliseconds in a large cluster: explanations,
// and outlooks. These change even if few pods come, because nodes do.
const minCostly, maxCostly = time.Second, time.Minute

// expectations tell the ledger which kinds of pods come, and what nodes have free beside their cards. A nil one does nothing: no view is by cost
// then.
type expectations struct {
	arrivals   *arrivals.Counter
	nodes      *eligibility.Cluster
	ledger     *ledger.Ledger
	cardPolicy placement.Policy
	leading    func() error
	clock      clock.WithTicker
	// besides is held from the time when what a node has free is read until the ledger has it, so that an older state doesn't replace a newer one.
	besides sync.Mutex
	// changed is true if the kinds or the nodes may have changed since the latest outlook, which was made at that time.
	changed atomic.Bool
	made    time.Time
}

// updated counts a pod that is new, has got its node or has ended, and reports what its node has free. old is nil for a new pod, also for one that has the
// name of a deleted one.
func (e *expectations) updated(old, pod *clustercache.PodInfo) {
	if e == nil {
		return
	}
	if old == nil && e.arrivals.Add(pod.Shape(), pod.Source(), time.Unix(int64(pod.Created), 0)) {
		e.expectSoon()
	}
	e.countWaiting(old, -1)
	e.countWaiting(pod, 1)
	if old != nil && pod.Ended {
		e.ended(old)
	}
	if old != nil && old.Node != pod.Node {
		if old.Node == "" && pod.Request > 0 && e.arrivals.Place() { // Pods can be created long before they are placed.
			e.expectSoon()
		}
		e.nodeChanged(old.Node)
	}
	e.nodeChanged(pod.Node)
}

// deleted counts a pod's end, and reports what its node has free.
func (e *expectations) deleted(pod *clustercache.PodInfo) {
	if e == nil {
		return
	}
	e.ended(pod)
	e.countWaiting(pod, -1)
	e.nodeChanged(pod.Node)
}

// countWaiting adds change to the number of pods that wait like the pod, which may be nil, if it waits for room: kube-scheduler has rejected it, or fair
// sharing holds it back.
func (e *expectations) countWaiting(pod *clustercache.PodInfo, change int) {
	if pod != nil && pod.Pending != nil && (pod.Pending.Rejected || pod.Gated) && !pod.GatedOtherwise && pod.RequestError == "" {
		e.arrivals.Wait(pod.Shape(), pod.Source(), change)
	}
}

// ended counts the end of a pod, whose former state is given: of each pod once, and only of those that used cards.
func (e *expectations) ended(former *clustercache.PodInfo) {
	if !former.Ended && former.Node != "" && former.Request > 0 {
		e.arrivals.End()
	}
}

// nodeChanged tells the ledger what the node has free beside its cards.
func (e *expectations) nodeChanged(name string) {
	if e == nil || name == "" {
		return
	}
	e.besides.Lock()
	defer e.besides.Unlock()
	if free, all, known := e.nodes.FreeResources(name); known {
		e.ledger.SetNodeResources(name, free, all)
	}
}

// expectSoon makes a new outlook due.
func (e *expectations) expectSoon() {
	if e != nil {
		e.changed.Store(true)
	}
}

// run makes a new outlook whenever one is due, until ctx ends.
func (e *expectations) run(ctx context.Context) error {
	e.expectIfDue(ctx)
	return background.Every(ctx, e.clock, minCostly, e.expectIfDue)
}

// expectIfDue makes a new outlook if pods have come or nodes have changed since the latest one, and each maxCostly. A standby places no pod, and
// makes only the latter.
func (e *expectations) expectIfDue(context.Context) {
	if now := e.clock.Now(); now.Sub(e.made) >= maxCostly || e.changed.Load() && e.leading() == nil {
		e.changed.Store(false)
		e.made = now
		e.expect()
	}
}

// expect makes a new outlook.
func (e *expectations) expect() {
	e.ledger.Expect(e.arrivals.Kinds(), e.arrivals.Turnover(), e.cardPolicy, e.nodes.UsableNodes)
}

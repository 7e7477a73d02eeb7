package scheduling

import (
	"context"
	"time"

	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/arrivals"
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
	clock      clock.Clock
	// changed has an element if the kinds may have changed.
	changed chan struct{}
}

// updated counts a pod that is new or has ended, and reports what its node has free.
func (e *expectations) updated(old, pod *clustercache.PodInfo) {
	if e == nil {
		return
	}
	if old == nil || old.UID != pod.UID {
		if e.arrivals.Add(pod.Shape(), pod.Source(), time.Unix(int64(pod.Created), 0)) {
			e.expectSoon()
		}
	}
	e.waits(old, -1)
	e.waits(pod, 1)
	if old != nil && pod.Ended {
		e.ended(old)
	}
	if old != nil && old.Node != pod.Node {
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
	e.waits(pod, -1)
	e.nodeChanged(pod.Node)
}

// waits adds change to the number of pods that wait like the pod, which may be nil, if it waits for room: kube-scheduler has rejected it, or fair
// sharing holds it back.
func (e *expectations) waits(pod *clustercache.PodInfo, change int) {
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
	if free, all, revision, known := e.nodes.FreeBeside(name); known {
		e.ledger.SetBeside(name, free, all, revision)
	}
}

// expectSoon makes run make a new outlook.
func (e *expectations) expectSoon() {
	if e == nil {
		return
	}
	select {
	case e.changed <- struct{}{}:
	default:
	}
}

// expect makes a new outlook.
func (e *expectations) expect() {
	e.ledger.Expect(e.arrivals.Kinds(), e.arrivals.Turnover(), e.cardPolicy, e.nodes.Names)
}

// run makes the outlook again when pods have come or nodes have changed, until ctx ends. A standby, which places no pod, makes one in each maxCostly.
func (e *expectations) run(ctx context.Context) error {
	for {
		e.expect()
		made := e.clock.Now()
		for due := false; !due; due = e.clock.Since(made) >= maxCostly || len(e.changed) > 0 && e.leading() == nil {
			select {
			case <-ctx.Done():
				return nil
			case <-e.clock.After(minCostly):
			}
		}
		select {
		case <-e.changed:
		default:
		}
	}
}

package eviction

import (
	"cmp"
	"context"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
)

const (
	// interval is the minimum time between two rounds of evictions.
	interval = time.Second
	// cycle is longer than kube-scheduler takes from the filter call for a pod to the preempt call in the same scheduling cycle, and than the watch
	// usually takes to show what kube-scheduler does then. Evictions for the pod begin that long after its first rejection at the earliest:
	// kube-scheduler, which may preempt on other nodes, goes first.
	cycle = 5 * time.Second
	// candidatesLife is how long the candidate nodes of a filter call remain valid, because a node can be cordoned later.
	// Every change that makes evictions possible also makes kube-scheduler send a new filter call. It is also the longest pause of a pod for which
	// there is no plan.
	candidatesLife = 30 * time.Second
	// maxBlocked limits the blocked pods that are remembered, and maxBlockedNodes the nodes of each, which is far above
	// what Kubernetes supports. maxPlans limits the nodes that are compared for one pod. maxTries limits the pods that
	// are planned for in one step; all remembered pods get their turn within queue.Retry.
	maxBlocked      = 100
	maxBlockedNodes = 10_000
	maxPlans        = 100
	maxTries        = 20
)

// The reasons of the Events of evictions: EventEvicted on the victim, EventEvicting on the pod for which it is evicted.
const (
	EventEvicted  = "GPUCardEvicted"
	EventEvicting = "GPUCardEvicting"
)

// blockedPod is a pod that filter rejected, with the nodes that would suit it if one of their cards were freed. The Pod
// object of the request is not kept: it can be as large as a request.
type blockedPod struct {
	pod   gpu.Pod
	nodes []string
	// nominated is the node of the pod's nomination at the last filter call.
	nominated string
	// asked is the time of the last filter call. at is the earliest time of evictions for it.
	asked, at time.Time
}

// Rejected records that filter found no node for the pod, which is nominated to a node or to none. full yields the candidate
// nodes of which no card has room now.
func (e *Preemptors) Rejected(pod gpu.Pod, nominated string, full iter.Seq[string], at time.Time) {
	if !e.fragmented {
		return
	}
	nodes := make([]string, 0, 16)
	for name := range full {
		if len(nodes) == maxBlockedNodes {
			break
		}
		nodes = append(nodes, strings.Clone(name)) // The name may be a slice of the whole request.
	}
	if len(nodes) == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	b := blockedPod{pod: pod, nodes: nodes, nominated: strings.Clone(nominated), asked: at, at: at.Add(cycle)}
	if before, known := e.blocked[pod.UID]; known && before.nominated == b.nominated {
		b.at = before.at
	}
	e.blocked[pod.UID] = b
	if len(e.blocked) > maxBlocked {
		last := slices.MaxFunc(slices.Collect(maps.Values(e.blocked)), e.compare)
		delete(e.blocked, last.pod.UID)
	}
}

// compare orders pods by descending priority, then by the earliest time of evictions, and postponed pods last. The caller holds the lock.
func (e *Preemptors) compare(a, b blockedPod) int {
	now := e.Clock.Now()
	return cmp.Or(gpu.TrueFirst(e.postponed.Has(b.pod.UID, now), e.postponed.Has(a.pod.UID, now)),
		cmp.Compare(b.pod.Priority, a.pod.Priority), a.at.Compare(b.at), cmp.Compare(a.pod.UID, b.pod.UID))
}

// Passed records that filter found a node for the pod.
func (e *Preemptors) Passed(uid gpu.PodUID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.blocked, uid)
}

// step gives up the places that were of no use, and begins at most one round of evictions.
func (e *Preemptors) step(ctx context.Context) {
	e.adopt()
	e.updatePreemptors()
	if !e.Cache.BudgetsSynced() {
		return
	}
	tries := 0
	for _, b := range e.due() {
		if tries == maxTries || e.executor.Full() {
			return
		}
		pod, needed := e.needed(b)
		if !needed {
			continue
		}
		tries++
		chosen, found := e.choosePlan(ctx, pod, b.nodes)
		if !found {
			e.mu.Lock()
			e.postponed.Extend(b.pod.UID, e.Clock.Now(), queue.Retry, candidatesLife)
			e.mu.Unlock()
			continue
		}
		if e.begin(ctx, chosen) {
			return
		}
	}
}

// due returns the pods for which others may be evicted, in their order.
func (e *Preemptors) due() []blockedPod {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.Clock.Now()
	e.postponed.Prune(now, queue.LongestPause)
	maps.DeleteFunc(e.blocked, func(_ gpu.PodUID, b blockedPod) bool { return now.Sub(b.asked) > candidatesLife })
	var due []blockedPod
	for uid, b := range e.blocked {
		if _, under := e.preemptors[uid]; !under && !now.Before(b.at) && !e.postponed.Has(uid, now) {
			due = append(due, b)
		}
	}
	slices.SortFunc(due, e.compare)
	return due
}

// needed returns the pod if only evictions can help it now.
func (e *Preemptors) needed(b blockedPod) (*clustercache.PodInfo, bool) {
	pod, known := e.Cache.Pod(b.pod.Namespace, b.pod.Name)
	if !known || pod.UID != b.pod.UID || pod.Pending == nil {
		e.Forget(b.pod.UID)
		return nil, false
	}
	if node := pod.NominatedNode; node != "" && (node != b.nominated || e.nominationValid(pod, node)) {
		return nil, false // kube-scheduler has found a node.
	}
	return pod, !e.fits(b.pod, b.nodes...) // If a card has room now, the pod is requeued.
}

package eviction

import (
	"cmp"
	"context"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
)

const (
	// interval is the minimum time between the evictions for two pods.
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

// Defragmenter frees cards for pods that are pending only because of fragmentation: the node's sum has room for them, but too few cards have, mostly
// none. kube-scheduler counts by node. Up to 1.37 it finds no victim that would help, and sends no preempt call. The rules for the victims are those
// of preemption, but no disruption budget is violated. The Executor evicts them. PlaceKeeper keeps the place of the pod.
//
// Rejected and Forget are safe for concurrent use, and do nothing if it is nil; mu guards the fields below it.
type Defragmenter struct {
	evictor
	executor   *Executor
	preemptors *PlaceKeeper

	mu      sync.Mutex
	blocked map[gpu.PodUID]blockedPod
}

// NewDefragmenter returns a Defragmenter. It evicts nothing before Run.
func NewDefragmenter(x *Executor, preemptors *PlaceKeeper) *Defragmenter {
	return &Defragmenter{evictor: x.evictor, executor: x, preemptors: preemptors, blocked: map[gpu.PodUID]blockedPod{}}
}

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
func (d *Defragmenter) Rejected(pod gpu.Pod, nominated string, full iter.Seq[string], at time.Time) {
	if d == nil {
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
	d.mu.Lock()
	defer d.mu.Unlock()
	b := blockedPod{pod: pod, nodes: nodes, nominated: strings.Clone(nominated), asked: at, at: at.Add(cycle)}
	if before, known := d.blocked[pod.UID]; known && before.nominated == b.nominated {
		b.at = before.at
	}
	d.blocked[pod.UID] = b
	if len(d.blocked) > maxBlocked {
		last := slices.MaxFunc(slices.Collect(maps.Values(d.blocked)), d.compare)
		delete(d.blocked, last.pod.UID)
	}
}

// compare orders pods by descending priority, then by the earliest time of evictions, and those that pause last. The caller holds the lock.
func (d *Defragmenter) compare(a, b blockedPod) int {
	return cmp.Or(gpu.TrueFirst(d.preemptors.pauses(b.pod.UID), d.preemptors.pauses(a.pod.UID)),
		cmp.Compare(b.pod.Priority, a.pod.Priority), a.at.Compare(b.at), cmp.Compare(a.pod.UID, b.pod.UID))
}

// Forget forgets the pod, because filter found a node for it, or no eviction would help.
func (d *Defragmenter) Forget(uid gpu.PodUID) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.blocked, uid)
}

// Run evicts pods as needed until ctx ends.
func (d *Defragmenter) Run(ctx context.Context) error {
	return background.Every(ctx, d.Clock, interval, d.Tick)
}

// Tick performs one step of Run.
func (d *Defragmenter) Tick(ctx context.Context) {
	switch {
	case d.Leading() != nil:
		d.mu.Lock()
		defer d.mu.Unlock()
		clear(d.blocked)
	case d.Cache.Ready() == nil:
		d.step(ctx)
	}
}

// step begins the evictions for at most one pod.
func (d *Defragmenter) step(ctx context.Context) {
	if !d.Cache.BudgetsSynced() {
		return
	}
	tries := 0
	for _, b := range d.due() {
		if tries == maxTries || !d.executor.Ready() {
			return
		}
		pod, needed := d.needed(b)
		if !needed {
			continue
		}
		tries++
		chosen, found := d.choosePlan(ctx, pod, b.nodes)
		if !found {
			d.preemptors.pause(b.pod.UID, queue.Retry, candidatesLife)
			continue
		}
		if d.begin(ctx, chosen) {
			return
		}
	}
}

// due returns the pods for which others may be evicted, in their order.
func (d *Defragmenter) due() []blockedPod {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := d.Clock.Now()
	maps.DeleteFunc(d.blocked, func(_ gpu.PodUID, b blockedPod) bool { return now.Sub(b.asked) > candidatesLife })
	var due []blockedPod
	for uid, b := range d.blocked {
		if !now.Before(b.at) && d.preemptors.mayAdd(uid) {
			due = append(due, b)
		}
	}
	slices.SortFunc(due, d.compare)
	return due
}

// needed returns the pod if only evictions can help it now.
func (d *Defragmenter) needed(b blockedPod) (*clustercache.PodInfo, bool) {
	pod, known := d.Cache.Pod(b.pod.Namespace, b.pod.Name)
	if !known || pod.UID != b.pod.UID || pod.Pending == nil {
		d.Forget(b.pod.UID)
		return nil, false
	}
	if node := pod.NominatedNode; node != "" && (node != b.nominated || d.nominationValid(pod, node)) {
		return nil, false // kube-scheduler has found a node.
	}
	return pod, !fits(d.Ledger, b.pod, b.nodes...) // If a card has room now, the pod is requeued.
}

// begin reserves the cards, checks the victims by live reads and dry runs, and then evicts them. If no eviction was made, it gives the cards back. It
// reports whether this step must not try another pod: evictions have begun, no victim is left to evict, or the API server doesn't answer.
func (d *Defragmenter) begin(ctx context.Context, plan plan) (done bool) {
	pod := plan.pod
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(pod.Namespace, pod.Name), "node", plan.node, "cards", plan.where.Cards())
	d.mu.Lock()
	_, blocked := d.blocked[pod.UID]
	added := blocked && d.preemptors.add(plan.preemptor)
	d.mu.Unlock()
	if !added {
		return false // Filter has found a node meanwhile, or kube-scheduler evicts pods for it.
	}
	if len(plan.evictions) == 0 {
		return true // All victims are terminating already.
	}
	begun, err := d.evict(ctx, plan)
	d.preemptors.evicted(pod.UID, begun)
	d.Observer.Evicted(resultOf(err))
	if err != nil {
		logger.Error(err, "Not all victims evicted for a pod that only fragmentation keeps pending, trying again after a pause", "result", resultOf(err))
		return begun || !answered(err)
	}
	logger.Info("Freeing a card for a pod that only fragmentation keeps pending", "evicted", len(plan.evictions))
	lacking := "no card has"
	if len(plan.where) > 1 {
		lacking = "too few cards have"
	}
	d.Recorder.Eventf(apiserver.Reference(pod), corev1.EventTypeNormal, EventEvicting,
		"Evicting %d pod(s) of lower priority from GPU %s of node %s: the node has enough free GPU memory, but %s",
		len(plan.evictions), plan.where, plan.node, lacking)
	return true
}

// evict makes the evictions of a plan. It reports whether a pod was evicted, or may have been.
func (d *Defragmenter) evict(ctx context.Context, plan plan) (begun bool, err error) {
	if _, err := d.readUnbound(ctx, plan.pod); err != nil {
		return false, err
	}
	if err := d.executor.DryRun(ctx, plan.evictions); err != nil {
		return false, err
	}
	_, until, err := d.executor.Evict(ctx, plan.evictions)
	return !until.IsZero(), err
}

package eviction

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
)

// This file frees cards for pods that are pending only because of fragmentation: the node's sum has room for them, but too few cards have, mostly
// none. kube-scheduler counts by node. Up to 1.37 it finds no victim that would help, and sends no preempt call. The rules for the victims are those
// of preemption, but no disruption budget is violated.

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

// blockedPod is a pod that filter rejected, with the nodes that would suit it if one of their cards were freed. The Pod
// object of the request is not kept: it can be as large as a request.
type blockedPod struct {
	pod   gpu.Pod
	nodes []string
	// nominated is the node of the pod's nomination at the last filter call.
	nominated string
	// rejected is the time of the last filter call. from is the earliest time of evictions for it.
	rejected, from time.Time
}

// Rejected records that filter found no node for the pod, which is nominated to a node or to none. full yields the candidate
// nodes of which no card has room now.
func (ps *Preemptors) Rejected(pod gpu.Pod, nominated string, full iter.Seq[string], at time.Time) {
	if !ps.evictFragmented {
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
	ps.mu.Lock()
	defer ps.mu.Unlock()
	b := blockedPod{pod: pod, nodes: nodes, nominated: strings.Clone(nominated), rejected: at, from: at.Add(cycle)}
	if before, known := ps.blocked[pod.UID]; known && before.nominated == b.nominated {
		b.from = before.from
	}
	ps.blocked[pod.UID] = b
	if len(ps.blocked) > maxBlocked {
		last := slices.MaxFunc(slices.Collect(maps.Values(ps.blocked)), ps.compare)
		delete(ps.blocked, last.pod.UID)
	}
}

// compare orders pods by descending priority, then by the earliest time of evictions, and those that pause last. The caller holds the lock.
func (ps *Preemptors) compare(a, b blockedPod) int {
	now := ps.Clock.Now()
	return cmp.Or(gpu.TrueFirst(ps.paused.Has(b.pod.UID, now), ps.paused.Has(a.pod.UID, now)),
		cmp.Compare(b.pod.Priority, a.pod.Priority), a.from.Compare(b.from), cmp.Compare(a.pod.UID, b.pod.UID))
}

// Unblock forgets the rejection of the pod, because filter found a node for it, or no eviction would help.
func (ps *Preemptors) Unblock(uid gpu.PodUID) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	delete(ps.blocked, uid)
}

// freeCards begins the evictions for at most one blocked pod.
func (ps *Preemptors) freeCards(ctx context.Context) {
	tries := 0
	for _, b := range ps.due() {
		if tries == maxTries || !ps.executor.Ready() {
			return
		}
		pod, needed := ps.needed(b)
		if !needed {
			continue
		}
		tries++
		plan, found := ps.choosePlan(pod, b.nodes)
		if !found {
			ps.mu.Lock()
			ps.paused.Extend(b.pod.UID, ps.Clock.Now(), queue.Retry, candidatesLife)
			ps.mu.Unlock()
		} else if ps.begin(ctx, plan) {
			return
		}
	}
}

// due returns the blocked pods for which others may be evicted, in their order.
func (ps *Preemptors) due() (due []blockedPod) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	now := ps.Clock.Now()
	maps.DeleteFunc(ps.blocked, func(_ gpu.PodUID, b blockedPod) bool { return now.Sub(b.rejected) > candidatesLife })
	for uid, b := range ps.blocked {
		if !now.Before(b.from) && !ps.paused.Has(uid, now) && ps.mayFree(uid) {
			due = append(due, b)
		}
	}
	slices.SortFunc(due, ps.compare)
	return due
}

// mayFree reports whether no cards are being freed for the pod. The caller holds the lock.
func (ps *Preemptors) mayFree(uid gpu.PodUID) bool {
	_, known := ps.all[uid]
	return !known && ps.proposed(uid) == nil
}

// needed returns the pod if only evictions can help it now.
func (ps *Preemptors) needed(b blockedPod) (*clustercache.PodInfo, bool) {
	pod := ps.cached(b.pod)
	if pod == nil || pod.Pending == nil {
		return nil, false
	}
	if node := pod.NominatedNode; node != "" && (node != b.nominated || ps.nominationValid(pod, node)) {
		return nil, false // kube-scheduler has found a node.
	}
	return pod, !ps.fits(b.pod, b.nodes...) // If a card has room now, the pod is requeued.
}

// nominationValid reports whether the pod can still get a card of the node to which it is nominated.
func (ps *Preemptors) nominationValid(pod *clustercache.PodInfo, name string) bool {
	object, ok := ps.Cache.Node(name)
	if !ok {
		return false // The node was deleted in the meantime.
	}
	available, reason := ps.Ledger.Availability(name, pod.Pod, nil)
	if reason.Unresolvable() {
		return false
	}
	node := eligibility.Node{Object: object}
	if reasons := eligibility.Closed(object, protocol.ParseNode(object)); len(reasons) > 0 {
		node.Closed = reasons[0].Text
	}
	leaving := slices.ContainsFunc(ps.Cache.PodsOn(name), func(other *clustercache.PodInfo) bool {
		return other.Node != "" && other.Request > 0 && other.Leaving && other.Priority < pod.Priority && !other.Overdue(ps.Clock.Now())
	})
	return node.NominationValid(eligibility.Parse(pod.Constraints), available.Cards, pod.Demand(), leaving)
}

// fits reports whether the pod would find a card on one of the nodes.
func (ps *Preemptors) fits(pod gpu.Pod, nodes ...string) (fits bool) {
	_, fits = ps.Ledger.FirstFit(pod, nodes)
	return fits
}

// plan is the choice of the pods to evict from cards of a node, for a preemptor.
type plan struct {
	preemptor
	// where is what the pod is to get.
	where gpu.Placement
	// evictions are those of the victims that aren't terminating yet.
	evictions []Victim
}

// choosePlan chooses the victims on one of the candidate nodes. It returns false if not enough cards can be freed within all budgets.
func (ps *Preemptors) choosePlan(pod *clustercache.PodInfo, candidates []string) (plan, bool) {
	var names []string
	var nodes []preemption.Node
	outranked := ps.Ledger.NodesWithLowerPriority(pod.Pod, candidates)
	if len(outranked) > maxPlans { // Different nodes each time, so that the last ones are compared too.
		rand.Shuffle(len(outranked), func(i, j int) { outranked[i], outranked[j] = outranked[j], outranked[i] })
	}
	s := NewSurvey(ps.Ledger, ps.Cache, ps.PodGroups, pod, ps.Clock.Now())
	for _, name := range outranked {
		if len(nodes) == maxPlans {
			break
		}
		node, ok := s.node(name, preemption.Victims{})
		if ok && preemption.Fragmented(node, s.request) && ps.Ledger.FitsResources(name, []gpu.Pod{pod.Pod}, nil, nil) {
			node.Pods = slices.DeleteFunc(node.Pods, func(p preemption.Pod) bool { return !p.Terminating && !ps.executor.mayEvict(p.UID, p.Budgets) })
			names, nodes = append(names, name), append(nodes, node)
		}
	}
	chosen, ok := preemption.ChooseNode(nodes, s.request)
	if !ok || chosen.Violations > 0 {
		return plan{}, false
	}
	out := plan{
		preemptor: preemptor{pod: pod.Pod, node: names[chosen.Node], victims: chosen.Pods, own: true, nominated: pod.NominatedNode},
		where:     pod.Demand().On(slices.Sorted(slices.Values(chosen.Cards))...),
	}
	for _, uid := range chosen.Pods {
		if _, victim, held := ps.Ledger.Lookup(uid); held && !victim.Leaving {
			out.evictions = append(out.evictions, Victim{
				Pods: IDs(victim.Pod), For: IDs(pod.Pod)[0], Cause: ByPriority,
				Message: fmt.Sprintf("Evicted from GPU %s of node %s for pod %s of higher priority", victim.Placement, out.node, pod.Pod),
			})
		}
	}
	return out, true
}

// begin reserves the cards, and then evicts the victims. If no eviction was made, it gives the cards back. It reports whether this step must not try
// another pod: evictions have begun, no victim is left to evict, or the API server doesn't answer.
func (ps *Preemptors) begin(ctx context.Context, plan plan) (done bool) {
	pod := plan.pod
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(pod.Namespace, pod.Name), "node", plan.node, "cards", plan.where.Cards())
	ps.mu.Lock()
	_, blocked := ps.blocked[pod.UID]
	begins := blocked && ps.mayFree(pod.UID)
	if begins {
		p := plan.preemptor // The plan itself doesn't change.
		ps.reserve(&p)
	}
	ps.mu.Unlock()
	if !begins {
		return false // Filter has found a node meanwhile, or kube-scheduler evicts pods for it.
	}
	if len(plan.evictions) == 0 {
		return true // All victims are terminating already.
	}
	begun, err := ps.evict(ctx, plan)
	if !begun {
		ps.mu.Lock()
		if p, known := ps.all[pod.UID]; known {
			ps.end(p, queue.Retry)
		}
		ps.mu.Unlock()
	}
	ps.Observer.Evicted(resultOf(err))
	if err != nil {
		logger.Error(err, "Not all victims evicted for a pod that only fragmentation keeps pending, trying again after a pause", "result", resultOf(err))
		return begun || !answered(err)
	}
	logger.Info("Freeing a card for a pod that only fragmentation keeps pending", "evicted", len(plan.evictions))
	ps.Recorder.Eventf(apiserver.Reference(pod), corev1.EventTypeNormal, EventEvicting,
		"Evicting %d pod(s) of lower priority from GPU %s of node %s: the node has enough free GPU memory, but too few of its cards have",
		len(plan.evictions), plan.where, plan.node)
	return true
}

// evict checks the victims of a plan by live reads and dry runs, and then evicts them. It reports whether a pod was evicted, or may have been.
func (ps *Preemptors) evict(ctx context.Context, plan plan) (begun bool, err error) {
	if _, err := ps.readUnbound(ctx, plan.pod); err != nil {
		return false, err
	}
	if err := ps.executor.DryRun(ctx, plan.evictions); err != nil {
		return false, err
	}
	until, err := ps.executor.Evict(ctx, plan.evictions)
	return !until.IsZero(), err
}

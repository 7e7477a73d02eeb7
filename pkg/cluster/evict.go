package cluster

import (
	"cmp"
	"context"
	"iter"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/waiting"
)

const (
	// evictInterval is the minimum time between two rounds of evictions.
	evictInterval = time.Second
	// evictDelay is the time from the first rejection of a pod to a round of evictions for it. kube-scheduler, which
	// may preempt on other nodes, goes first, and memory that is freed in the meantime may be enough.
	evictDelay = 3 * time.Second
	// evictFresh is how long the candidate nodes of a filter call remain valid, because a node can be cordoned later.
	// Every change that makes a round possible also makes kube-scheduler send a new filter call.
	evictFresh = 30 * time.Second
	// evictHold is how long a freed card is reserved for the pod. If the pod doesn't take the card in that time,
	// something unknown to the extender keeps it off the node: for evictRest no pod is evicted for it.
	evictHold = time.Minute
	evictRest = 10 * time.Minute
	// evictPause is the first pause of a blocked pod after a failed round, or if there is no plan for it. The pause
	// doubles each time, up to evictRest after a round, or planPause without a plan.
	evictPause = 10 * time.Second
	planPause  = time.Minute
	// victimPause is the first pause for which a pod stays out of plans after the API server rejected its eviction.
	victimPause = 5 * time.Minute
	// maxBlocked limits the blocked pods that are remembered, and maxBlockedNodes the nodes of each, which is far above
	// what Kubernetes supports. maxPlans limits the nodes that are compared for one pod. maxTries limits the pods that
	// are planned for in one step; all remembered pods get their turn within evictPause.
	maxBlocked      = 100
	maxBlockedNodes = 10_000
	maxPlans        = 100
	maxTries        = 20
	// evictTimeout limits one API call.
	evictTimeout = 5 * time.Second
)

// The results of a round of evictions, as labels of metrics.
const (
	EvictedAll      = "evicted"
	EvictionRefused = "refused"
	EvictionFailed  = "failed"
)

// The reasons of the Events of evictions: EventEvicted on the victim, EventEvicting on the pod for which it is evicted.
const (
	EventEvicted  = "GPUCardEvicted"
	EventEvicting = "GPUCardEvicting"
)

// evictor frees a card for a pod that is pending only because of fragmentation: the node's sum has room for it, but no
// card has. kube-scheduler counts by node, finds no victim that would help, and never sends a preempt call. The rules
// are those of Preempt, but no disruption budget is violated.
//
// A round evicts the pods that occupy one card, and reserves that card for one pod as for a nominated pod. A round ends
// when its pod is bound or deleted, when the pod doesn't take the card, when another pod takes it, when a victim stays,
// or when the leader's term ends. The next leader then finds the victims terminating and continues with the same card.
//
// mu guards the fields below it.
type evictor struct {
	*Cluster

	mu      sync.Mutex
	blocked map[gpu.PodUID]blockedPod
	rounds  map[gpu.PodUID]round
	// asked holds the pods whose eviction was requested and is not yet visible in the watch, with the time of the
	// request. Until then no other pod is evicted.
	asked map[gpu.PodUID]time.Time
	// postponed holds the blocked pods that get no round for a while. spared holds the pods that are not evicted for a
	// while.
	postponed, spared pauses
}

// blockedPod is a pod that filter rejected, with the nodes that would suit it if one of their cards were freed. The Pod
// object of the request is not kept: it can be as large as a request.
type blockedPod struct {
	pod   gpu.Pod
	nodes []string
	// nominated is the node of the pod's nomination at the last filter call.
	nominated string
	// asked is the time of the last filter call. at is the earliest time of a round.
	asked, at time.Time
}

// round is the freeing of one card for one pod.
type round struct {
	pod     gpu.Pod
	node    string
	victims []gpu.PodUID
	// nominated is the node of the pod's nomination, no longer valid, when the round began.
	nominated string
	// freed is when the last victim was gone.
	freed time.Time
}

func newEvictor(c *Cluster) *evictor {
	e := &evictor{Cluster: c}
	e.clear()
	return e
}

// clear removes all state. The caller holds the lock, or the evictor isn't used yet.
func (e *evictor) clear() {
	e.blocked, e.rounds, e.asked = map[gpu.PodUID]blockedPod{}, map[gpu.PodUID]round{}, map[gpu.PodUID]time.Time{}
	e.postponed, e.spared = pauses{}, pauses{}
}

// Blocked records that filter found no node for the pod. full yields the candidate nodes of which no card has room now.
func (c *Cluster) Blocked(pod *corev1.Pod, full iter.Seq[string], at time.Time) {
	if c.evictor == nil || neverPreempts(pod) {
		return
	}
	nodes := make([]string, 0, 16)
	for name := range full {
		if len(nodes) == maxBlockedNodes {
			break
		}
		nodes = append(nodes, strings.Clone(name)) // The name may be a slice of the whole request.
	}
	if len(nodes) > 0 {
		c.evictor.note(blockedPod{
			pod: protocol.Pod(pod), nodes: nodes, nominated: strings.Clone(pod.Status.NominatedNodeName), asked: at, at: at.Add(evictDelay),
		})
	}
}

func (e *evictor) note(b blockedPod) {
	e.mu.Lock()
	defer e.mu.Unlock()
	uid := b.pod.UID
	if before, known := e.blocked[uid]; known && before.nominated == b.nominated {
		b.at = before.at
	} else if !known && len(e.blocked) >= maxBlocked {
		least := slices.MaxFunc(slices.Collect(maps.Values(e.blocked)), e.compare)
		if e.compare(b, least) >= 0 {
			return
		}
		delete(e.blocked, least.pod.UID)
	}
	e.blocked[uid] = b
}

// compare orders the pods that are worth remembering first, and postponed pods last. The caller holds the lock.
func (e *evictor) compare(a, b blockedPod) int {
	now := e.Clock.Now()
	switch later, otherLater := e.postponed.has(a.pod.UID, now), e.postponed.has(b.pod.UID, now); {
	case later && !otherLater:
		return 1
	case !later && otherLater:
		return -1
	}
	return a.compare(b)
}

// compare orders pods by descending priority, then by the earliest time of a round.
func (b blockedPod) compare(o blockedPod) int {
	return cmp.Or(cmp.Compare(o.pod.Priority, b.pod.Priority), b.at.Compare(o.at), cmp.Compare(b.pod.UID, o.pod.UID))
}

// forget removes the pod, which is no longer pending.
func (e *evictor) forget(uid gpu.PodUID) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.blocked, uid)
	delete(e.rounds, uid)
	delete(e.postponed, uid)
}

// passed records that filter found a node for the pod.
func (e *evictor) passed(uid gpu.PodUID) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.blocked, uid)
}

// run begins rounds as needed until ctx ends.
func (e *evictor) run(ctx context.Context) error {
	ticker := e.Clock.NewTicker(evictInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		e.tick(ctx)
	}
}

// tick performs one step, or ends all rounds if this process isn't the leader.
func (e *evictor) tick(ctx context.Context) {
	switch {
	case e.leading() != nil:
		e.resign()
	case e.Ready() == nil && e.sync.budgets():
		e.step(ctx)
	}
}

// resign ends all rounds at the end of a term. The next leader continues them, and nothing of them may remain when this
// process leads again.
func (e *evictor) resign() {
	e.mu.Lock()
	rounds := e.rounds
	e.clear()
	e.mu.Unlock()
	for _, r := range rounds {
		e.letGo(r.pod)
	}
}

// step ends the rounds that are over, and begins at most one.
func (e *evictor) step(ctx context.Context) {
	e.confirm()
	e.endRounds()
	tries := 0
	for _, b := range e.due() {
		if tries == maxTries || e.awaitsWatch() {
			return
		}
		pod, needed := e.needed(b)
		if !needed {
			continue
		}
		tries++
		plan, found := e.plan(pod, b.nodes)
		if !found {
			e.postpone(b.pod.UID, planPause)
			continue
		}
		if e.begin(ctx, pod, plan) {
			return
		}
	}
}

// due returns the pods for which a round may begin, in their order.
func (e *evictor) due() []blockedPod {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.Clock.Now()
	e.postponed.prune(now)
	e.spared.prune(now)
	maps.DeleteFunc(e.blocked, func(_ gpu.PodUID, b blockedPod) bool { return now.Sub(b.asked) > evictFresh })
	var due []blockedPod
	for uid, b := range e.blocked {
		if _, under := e.rounds[uid]; !under && !now.Before(b.at) && !e.postponed.has(uid, now) {
			due = append(due, b)
		}
	}
	slices.SortFunc(due, blockedPod.compare)
	return due
}

// confirm removes the requested evictions that are visible in the watch, and those that can no longer take effect.
func (e *evictor) confirm() {
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.asked, func(uid gpu.PodUID, at time.Time) bool {
		_, holder, held := e.ledger.Lookup(uid)
		return !held || holder.Leaving || e.Clock.Since(at) > e.settler.fence()
	})
}

// awaitsWatch reports whether an eviction may have taken effect that the ledger doesn't know yet.
func (e *evictor) awaitsWatch() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.asked) > 0
}

// needed returns the pod, as the cache keeps it, if only evictions can help it now.
func (e *evictor) needed(b blockedPod) (*corev1.Pod, bool) {
	pod, known := e.pods.get(b.pod.Namespace, b.pod.Name)
	if !known || pod.UID != types.UID(b.pod.UID) || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
		e.forget(b.pod.UID)
		return nil, false
	}
	if node := pod.Status.NominatedNodeName; node != "" && (node != b.nominated || e.nominationStands(pod, node)) {
		return nil, false // kube-scheduler has found a node.
	}
	return pod, !e.fitsAny(b.pod, b.nodes) // If a card has room now, the waker requeues the pod.
}

// nominationStands reports whether the pod, as the cache keeps it, can still get a card of the node to which it is
// nominated.
func (e *evictor) nominationStands(pod *corev1.Pod, name string) bool {
	node, err := e.nodes.Get(name)
	if err != nil {
		return false // The node was deleted in the meantime.
	}
	standing, _ := e.ledger.Availability(name, protocol.Pod(pod)) // It has no cards if the node offers whole cards.
	place := waiting.Node{Object: node, Cards: standing.Cards, Terminating: e.leavingOn(name)}
	if reasons := waiting.Closed(node, false); len(reasons) > 0 {
		place.Closed = reasons[0]
	}
	return waiting.NominationValid(pod, &place)
}

// postpone pauses the pod: it gets no round until the pause ends. most limits the pause.
func (e *evictor) postpone(uid gpu.PodUID, most time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.postponed.extend(uid, e.Clock.Now(), evictPause, most)
}

// evictionPlan says which pods to evict from one card of a node.
type evictionPlan struct {
	node string
	card int
	// leave are the victims that aren't terminating yet. victims are all pods that must be gone before the card is
	// free.
	leave   []gpu.Pod
	victims []gpu.PodUID
}

// plan chooses the victims on one of the candidate nodes for the pod, which is as the cache keeps it. It returns false
// if no card can be freed without violating a disruption budget.
func (e *evictor) plan(pod *corev1.Pod, candidates []string) (evictionPlan, bool) {
	s := e.newSurvey(pod, pod.Spec.Resources.Requests)
	var names []string
	var nodes []preemption.Node
	outranked := e.ledger.Outranked(s.pod, candidates)
	if len(outranked) > maxPlans { // Different nodes each time, so that the last ones are compared too.
		rand.Shuffle(len(outranked), func(i, j int) { outranked[i], outranked[j] = outranked[j], outranked[i] })
	}
	for _, name := range outranked {
		if len(nodes) == maxPlans {
			break
		}
		if node, ok := s.node(name, preemption.Victims{}); ok && preemption.Fragmented(node, s.request) {
			node.Pods = slices.DeleteFunc(node.Pods, func(p preemption.Pod) bool { return !e.evictable(p) })
			names, nodes = append(names, name), append(nodes, node)
		}
	}
	chosen, ok := preemption.ChooseNode(nodes, s.request)
	if !ok || chosen.Violations > 0 {
		return evictionPlan{}, false
	}
	plan := evictionPlan{node: names[chosen.Node], card: chosen.Card, victims: chosen.Pods}
	for _, uid := range chosen.Pods {
		if _, holder, held := e.ledger.Lookup(uid); held && !holder.Leaving {
			plan.leave = append(plan.leave, holder.Pod)
		}
	}
	return plan, true
}

// evictable reports whether the pod is terminating, or the API server is expected to evict it. The API server evicts no
// pod with several budgets (k8s.io/kubernetes pkg/registry/core/pod/storage/eviction.go), and is likely to reject again
// an eviction that it rejected recently.
func (e *evictor) evictable(p preemption.Pod) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return p.Terminating || len(p.Budgets) < 2 && !e.spared.has(p.UID, e.Clock.Now())
}

// neverPreempts reports whether the pod's preemption policy is Never.
func neverPreempts(pod *corev1.Pod) bool {
	policy := pod.Spec.PreemptionPolicy
	return policy != nil && *policy == corev1.PreemptNever
}

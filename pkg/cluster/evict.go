package cluster

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
)

const (
	// evictInterval is the least time between two rounds of evictions.
	evictInterval = time.Second
	// evictDelay is how long a refused pod waits before others are evicted for it: kube-scheduler, which may preempt on
	// other nodes, goes first, and what comes free meanwhile may do.
	evictDelay = 3 * time.Second
	// evictFresh is how long what filter was offered counts: a node can be cordoned meanwhile. Whatever changes such that
	// a round is possible makes kube-scheduler ask again.
	evictFresh = 30 * time.Second
	// evictHold is how long a card that was freed is kept for whom it was freed, and evictRest how long nobody else goes
	// for a pod that didn't take it: something must keep it off the node that isn't known here.
	evictHold = time.Minute
	evictRest = 10 * time.Minute
	// maxBlocked bounds the pods that are remembered, maxBlockedNodes the nodes of each, far above what Kubernetes supports,
	// maxPlans those that are compared.
	maxBlocked      = 100
	maxBlockedNodes = 10_000
	maxPlans        = 100
	// evictTimeout bounds one call.
	evictTimeout = 5 * time.Second
)

// The results of a round of evictions, as metrics label them.
const (
	EvictedAll      = "evicted"
	EvictionRefused = "refused"
	EvictionFailed  = "failed"
)

// The Events of evictions, on the pod that has to leave and on the one that it leaves for.
const (
	EventEvicted  = "GPUCardEvicted"
	EventEvicting = "GPUCardEvicting"
)

// evictor frees a card for a pod that nothing but fragmentation keeps waiting: the node's sum has room for it, no card
// has. kube-scheduler counts by node; it finds nobody whose going would help, and never asks for victims. The rules are
// those of Preempt, but disruption budgets aren't broken.
//
// In each round the pods go that keep one card from one pod. The card is then held for it as for a nominated pod. A round
// ends when its pod is bound or gone, when it hasn't taken the card, when somebody stays who was to leave, and with the
// leader's term: whoever leads next finds those that are leaving, and goes on with the same card.
type evictor struct {
	*Cluster

	mu      sync.Mutex
	blocked map[gpu.PodUID]blockedPod
	rounds  map[gpu.PodUID]round
	// asked are pods whose eviction the watch hasn't told of yet, and when it was asked for: until it has, nobody else is
	// evicted.
	asked map[gpu.PodUID]time.Time
}

// blockedPod is a pod that filter refused, and the nodes that would do if one of their cards were freed. The pod as it
// came with the request isn't kept: it can be as large as a request.
type blockedPod struct {
	pod   gpu.Pod
	nodes []string
	// asked is when filter was last asked, at from when on a round may follow.
	asked, at time.Time
}

type round struct {
	pod     gpu.Pod
	node    string
	victims []gpu.PodUID
	// freed is when the last victim had gone, over when it turned out that the pod doesn't get the card; zero before.
	freed, over time.Time
}

func newEvictor(c *Cluster) *evictor {
	return &evictor{
		Cluster: c, blocked: map[gpu.PodUID]blockedPod{}, rounds: map[gpu.PodUID]round{}, asked: map[gpu.PodUID]time.Time{},
	}
}

// Blocked notes that filter found a node for the pod nowhere, and on which of those that it was offered no card has room
// now.
func (c *Cluster) Blocked(pod *corev1.Pod, full iter.Seq[string], at time.Time) {
	if c.evictor == nil || pod.Status.NominatedNodeName != "" || neverPreempts(pod) {
		return
	}
	nodes := make([]string, 0, 16)
	for name := range full {
		if len(nodes) == maxBlockedNodes {
			break
		}
		nodes = append(nodes, strings.Clone(name)) // It may be part of a whole request.
	}
	if len(nodes) > 0 {
		c.evictor.note(blockedPod{pod: protocol.Pod(pod), nodes: nodes, asked: at, at: at.Add(evictDelay)})
	}
}

func (e *evictor) note(b blockedPod) {
	e.mu.Lock()
	defer e.mu.Unlock()
	uid := b.pod.UID
	if before, known := e.blocked[uid]; known {
		b.at = before.at
	} else if len(e.blocked) >= maxBlocked {
		least := slices.MaxFunc(slices.Collect(maps.Values(e.blocked)), blockedPod.compare)
		if b.compare(least) >= 0 {
			return
		}
		delete(e.blocked, least.pod.UID)
	}
	e.blocked[uid] = b
}

// compare puts those first that go first.
func (b blockedPod) compare(o blockedPod) int {
	return cmp.Or(cmp.Compare(o.pod.Priority, b.pod.Priority), b.at.Compare(o.at), cmp.Compare(b.pod.UID, o.pod.UID))
}

// forget notes that the pod waits no longer.
func (e *evictor) forget(uid gpu.PodUID) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.blocked, uid)
	delete(e.rounds, uid)
}

// passed notes that filter has found a node for the pod.
func (e *evictor) passed(uid gpu.PodUID) {
	if e == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.blocked, uid)
}

// holds says whether a card is held for the pod, which kube-scheduler doesn't nominate, and sees to it that it is that one:
// kube-scheduler may have nominated the pod to another node meanwhile.
func (e *evictor) holds(pod gpu.Pod) bool {
	if e == nil {
		return false
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	r, ok := e.rounds[pod.UID]
	if !ok || !r.over.IsZero() {
		return false
	}
	e.ledger.Nominate(r.node, pod) // With the lock: who ends the round withdraws afterwards.
	return true
}

// run begins rounds where needed until ctx ends.
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

// tick does what there is to do now.
func (e *evictor) tick(ctx context.Context) {
	switch {
	case e.leading() != nil:
		e.resign()
	case e.Ready() == nil && e.sync.budgets():
		e.step(ctx)
	}
}

// resign ends everything at the end of a term: what was under way is the next leader's business, and of what this one
// meant to do nothing may be left when it leads again.
func (e *evictor) resign() {
	e.mu.Lock()
	rounds := e.rounds
	e.blocked, e.rounds, e.asked = map[gpu.PodUID]blockedPod{}, map[gpu.PodUID]round{}, map[gpu.PodUID]time.Time{}
	e.mu.Unlock()
	for _, r := range rounds {
		if r.over.IsZero() {
			e.letGo(r.pod)
		}
	}
}

// step ends the rounds that are to end, and begins one where there is reason to.
func (e *evictor) step(ctx context.Context) {
	e.endRounds()
	if e.awaitsWatch() {
		return
	}
	for _, b := range e.due() {
		pod, waits := e.pods.get(b.pod.Namespace, b.pod.Name)
		if !waits || pod.UID != types.UID(b.pod.UID) || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
			e.forget(b.pod.UID)
			continue
		}
		if pod.Status.NominatedNodeName != "" {
			continue // kube-scheduler has found a way.
		}
		plan, ok := e.plan(pod, b.nodes)
		if !ok {
			continue
		}
		e.begin(ctx, protocol.Pod(pod), plan)
		return
	}
}

// endRounds looks whether the pods have taken what was freed for them.
func (e *evictor) endRounds() {
	e.mu.Lock()
	now, over := e.Clock.Now(), []gpu.Pod(nil)
	for uid, r := range e.rounds {
		switch {
		case !r.over.IsZero():
			if now.Sub(r.over) > evictRest {
				delete(e.rounds, uid)
			}
			continue
		case r.freed.IsZero() && !slices.ContainsFunc(r.victims, e.isHeld):
			r.freed = now
		case r.freed.IsZero() && slices.ContainsFunc(r.victims, e.stays), !r.freed.IsZero() && now.Sub(r.freed) > evictHold:
			r.over = now
			over = append(over, r.pod)
		}
		e.rounds[uid] = r
	}
	e.mu.Unlock()
	for _, pod := range over {
		e.letGo(pod)
	}
}

// letGo holds the card no longer, unless kube-scheduler has nominated the pod meanwhile.
func (e *evictor) letGo(pod gpu.Pod) {
	if known, ok := e.pods.get(pod.Namespace, pod.Name); ok && known.UID == types.UID(pod.UID) && known.Status.NominatedNodeName != "" {
		return
	}
	e.ledger.Withdraw(pod.UID)
}

func (e *evictor) isHeld(uid gpu.PodUID) bool {
	_, _, held := e.ledger.Lookup(uid)
	return held
}

// stays says whether a pod that was to leave stays: its grace period is long over (nobody takes a finalizer off, or its
// node is dead), or it isn't leaving at all. It needs the evictor's lock.
func (e *evictor) stays(uid gpu.PodUID) bool {
	_, holder, held := e.ledger.Lookup(uid)
	if !held {
		return false
	}
	if !holder.Leaving {
		_, asked := e.asked[uid]
		return !asked
	}
	return e.overdue(holder.Pod)
}

func (e *evictor) isOverdue(uid gpu.PodUID) bool {
	_, holder, held := e.ledger.Lookup(uid)
	return held && e.overdue(holder.Pod)
}

// overdue says whether a leaving pod should have been gone for evictHold.
func (e *evictor) overdue(pod gpu.Pod) bool {
	known, ok := e.pods.get(pod.Namespace, pod.Name)
	return ok && known.UID == types.UID(pod.UID) && known.DeletionTimestamp != nil && e.Clock.Since(known.DeletionTimestamp.Time) > evictHold
}

// awaitsWatch says whether the ledger knows less than was done.
func (e *evictor) awaitsWatch() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.asked, func(uid gpu.PodUID, at time.Time) bool {
		_, holder, held := e.ledger.Lookup(uid)
		return !held || holder.Leaving || e.Clock.Since(at) > e.settler.fence() // It wasn't made, or its pod was let stay.
	})
	return len(e.asked) > 0
}

// due returns the pods for which a round may begin, in their order.
func (e *evictor) due() []blockedPod {
	e.mu.Lock()
	defer e.mu.Unlock()
	var due []blockedPod
	now := e.Clock.Now()
	maps.DeleteFunc(e.blocked, func(_ gpu.PodUID, b blockedPod) bool { return now.Sub(b.asked) > refusalLife })
	for uid, b := range e.blocked {
		if _, under := e.rounds[uid]; !under && !now.Before(b.at) && now.Sub(b.asked) <= evictFresh {
			due = append(due, b)
		}
	}
	slices.SortFunc(due, blockedPod.compare)
	return due
}

// evictionPlan is whom to evict of which node.
type evictionPlan struct {
	node string
	card int
	// leave are those that aren't leaving yet, victims everybody whom the card waits for.
	leave   []gpu.Pod
	victims []gpu.PodUID
}

// plan decides who leaves one of the nodes for the pod, a slim one. false says that nobody need, or that it wouldn't help.
func (e *evictor) plan(pod *corev1.Pod, candidates []string) (evictionPlan, bool) {
	s := e.newSurvey(pod, pod.Spec.Resources.Requests)
	var names []string
	var nodes []preemption.Node
	for _, name := range candidates {
		if e.fits(s.pod, name) {
			return evictionPlan{}, false // Room has come about. kube-scheduler is told, see waker.
		}
		if node, ok := s.node(name, preemption.Victims{}); ok && preemption.Fragmented(node, s.request) {
			// To wait for one of these costs nothing, and may never end.
			node.Pods = slices.DeleteFunc(node.Pods, func(p preemption.Pod) bool { return p.Leaving && e.isOverdue(p.UID) })
			names, nodes = append(names, name), append(nodes, node)
		}
		if len(nodes) == maxPlans {
			break
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

// begin holds the card, and evicts.
func (e *evictor) begin(ctx context.Context, pod gpu.Pod, plan evictionPlan) {
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(pod.Namespace, pod.Name), "node", plan.node, "card", plan.card)
	e.mu.Lock()
	e.rounds[pod.UID] = round{pod: pod, node: plan.node, victims: plan.victims}
	e.mu.Unlock()
	e.ledger.Nominate(plan.node, pod)
	if len(plan.leave) == 0 {
		return // Others, or an extender before this one, have told them to leave.
	}
	result, err := e.evict(ctx, pod, plan)
	e.Observer.Evicted(result)
	if err != nil {
		logger.Info("A card that only fragmentation keeps from a pod is not freed", "result", result, "err", err)
		e.cancel(pod, result)
		return
	}
	logger.Info("A card is freed for a pod that only fragmentation kept waiting", "evicted", len(plan.leave))
	e.Recorder.Eventf(reference(pod), corev1.EventTypeNormal, EventEvicting,
		"Evicting %d pod(s) of lower priority from GPU card %d of node %s: the node has enough free GPU memory, but no card has", len(plan.leave), plan.card, plan.node)
}

// evict asks the API server to evict everybody, once it has said of each that it would.
func (e *evictor) evict(ctx context.Context, pod gpu.Pod, plan evictionPlan) (result string, err error) {
	for _, dryRun := range []bool{true, false} {
		for _, victim := range plan.leave {
			if err := e.leading(); err != nil {
				return EvictionFailed, err
			}
			switch err := e.evictOne(ctx, victim, dryRun); {
			case apierrors.IsTooManyRequests(err):
				return EvictionRefused, fmt.Errorf("evicting pod %s/%s: %w", victim.Namespace, victim.Name, err)
			case err != nil:
				return EvictionFailed, fmt.Errorf("evicting pod %s/%s: %w", victim.Namespace, victim.Name, err)
			}
			if !dryRun {
				e.Recorder.Eventf(reference(victim), corev1.EventTypeNormal, EventEvicted,
					"Evicted from GPU card %d of node %s for pod %s/%s of higher priority", plan.card, plan.node, pod.Namespace, pod.Name)
			}
		}
	}
	return EvictedAll, nil
}

func (e *evictor) evictOne(ctx context.Context, victim gpu.Pod, dryRun bool) error {
	ctx, cancel := context.WithTimeout(ctx, evictTimeout)
	defer cancel()
	if !dryRun {
		// Before the call: its answer may be lost.
		e.mu.Lock()
		e.asked[victim.UID] = e.Clock.Now()
		e.mu.Unlock()
	}
	err := e.API.Evict(ctx, victim, dryRun)
	if !dryRun {
		e.Observer.APIWrite("eviction")
	}
	switch judge(err) {
	case refused, conflict:
		if !dryRun {
			e.mu.Lock()
			delete(e.asked, victim.UID)
			e.mu.Unlock()
		}
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // It has gone; perhaps another pod has its name.
	}
	return err
}

// cancel ends a round in which not everybody was evicted. Where a budget is in the way, the pod waits before the next.
func (e *evictor) cancel(pod gpu.Pod, result string) {
	e.mu.Lock()
	delete(e.rounds, pod.UID)
	if b, known := e.blocked[pod.UID]; known && result == EvictionRefused {
		b.at = e.Clock.Now().Add(evictHold)
		e.blocked[pod.UID] = b
	}
	e.mu.Unlock()
	e.letGo(pod)
}

// neverPreempts says whether the pod's policy lets nobody leave for it.
func neverPreempts(pod *corev1.Pod) bool {
	policy := pod.Spec.PreemptionPolicy
	return policy != nil && *policy == corev1.PreemptNever
}

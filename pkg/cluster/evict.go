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
	// evictPause is how long a pod is left out at first after a round that failed, or where there was nothing to plan. It
	// doubles each time, up to evictRest or planPause.
	evictPause = 10 * time.Second
	planPause  = time.Minute
	// victimPause is how long a pod stays out of plans whose eviction was refused, at first.
	victimPause = 5 * time.Minute
	// maxBlocked bounds the pods that are remembered, maxBlockedNodes the nodes of each, far above what Kubernetes supports,
	// maxPlans those that are compared, maxTries the pods that are planned for in one step: all that are remembered have their
	// turn within evictPause.
	maxBlocked      = 100
	maxBlockedNodes = 10_000
	maxPlans        = 100
	maxTries        = 20
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

// evictor frees a card for a pod that is pending only because of fragmentation: the node's sum has room for it, no card
// has. kube-scheduler counts by node, finds no victim that would help, and so never asks for one. The rules are those of
// Preempt, but disruption budgets aren't broken.
//
// A round evicts the pods that keep one card from one pod, and holds that card for it as for a nominated pod. A round ends
// when its pod is bound or deleted, when the pod hasn't taken the card or another pod has, when a victim stays, and with the
// leader's term: the next leader finds the victims leaving, and goes on with the same card.
type evictor struct {
	*Cluster

	mu      sync.Mutex
	blocked map[gpu.PodUID]blockedPod
	rounds  map[gpu.PodUID]round
	// asked are the pods whose eviction was requested and hasn't shown in the watch yet, and when it was requested. Meanwhile
	// no other pod is evicted.
	asked map[gpu.PodUID]time.Time
	// postponed are blocked pods that get no round for a while, spared are pods that aren't evicted for a while.
	postponed, spared pauses
}

// blockedPod is a pod that filter refused, and the nodes that would do if one of their cards were freed. The pod as it
// came with the request isn't kept: it can be as large as a request.
type blockedPod struct {
	pod   gpu.Pod
	nodes []string
	// nominated is the node that the pod was nominated to when filter was last asked.
	nominated string
	// asked is when filter was last asked, at from when on a round may follow.
	asked, at time.Time
}

// round is the freeing of one card for one pod.
type round struct {
	pod     gpu.Pod
	node    string
	victims []gpu.PodUID
	// nominated is the node of a nomination that the pod had when the round began, and that had become void.
	nominated string
	// freed is when the last victim had gone.
	freed time.Time
}

func newEvictor(c *Cluster) *evictor {
	e := &evictor{Cluster: c}
	e.clear()
	return e
}

// clear forgets everything. It needs the lock, or an evictor that isn't used yet.
func (e *evictor) clear() {
	e.blocked, e.rounds, e.asked = map[gpu.PodUID]blockedPod{}, map[gpu.PodUID]round{}, map[gpu.PodUID]time.Time{}
	e.postponed, e.spared = pauses{}, pauses{}
}

// Blocked notes that filter found a node for the pod nowhere, and on which of those that it was offered no card has room
// now.
func (c *Cluster) Blocked(pod *corev1.Pod, full iter.Seq[string], at time.Time) {
	if c.evictor == nil || neverPreempts(pod) {
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

// compare puts those first that are worth remembering: postponed ones last. It needs the lock.
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
	delete(e.postponed, uid)
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
	e.clear()
	e.mu.Unlock()
	for _, r := range rounds {
		e.letGo(r.pod)
	}
}

// step ends the rounds that are over, and begins one where there is reason to.
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

// confirm forgets the evictions that the watch has shown, and those that weren't made.
func (e *evictor) confirm() {
	e.mu.Lock()
	defer e.mu.Unlock()
	maps.DeleteFunc(e.asked, func(uid gpu.PodUID, at time.Time) bool {
		_, holder, held := e.ledger.Lookup(uid)
		return !held || holder.Leaving || e.Clock.Since(at) > e.settler.fence()
	})
}

// awaitsWatch reports whether an eviction may have been made that the ledger doesn't know of yet.
func (e *evictor) awaitsWatch() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.asked) > 0
}

// needed returns the pod, slim, if only evictions can help it now.
func (e *evictor) needed(b blockedPod) (*corev1.Pod, bool) {
	pod, known := e.pods.get(b.pod.Namespace, b.pod.Name)
	if !known || pod.UID != types.UID(b.pod.UID) || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
		e.forget(b.pod.UID)
		return nil, false
	}
	if node := pod.Status.NominatedNodeName; node != "" && (node != b.nominated || e.nominationStands(pod, node)) {
		return nil, false // kube-scheduler has found a way.
	}
	return pod, !e.fitsAny(b.pod, b.nodes) // Where there is room now, the waker requeues the pod.
}

// nominationStands reports whether the pod, a slim one, may still get a card of the node that it is nominated to.
func (e *evictor) nominationStands(pod *corev1.Pod, name string) bool {
	node, err := e.nodes.Get(name)
	if err != nil {
		return false // It has gone meanwhile.
	}
	standing, _ := e.ledger.Availability(name, protocol.Pod(pod)) // Without cards where whole ones are given out.
	place := waiting.Node{Object: node, Cards: standing.Cards, Terminating: e.leavingOn(name)}
	if reasons := waiting.Closed(node, false); len(reasons) > 0 {
		place.Closed = reasons[0]
	}
	return waiting.NominationValid(pod, &place)
}

// postpone leaves the pod out for a while.
func (e *evictor) postpone(uid gpu.PodUID, most time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.postponed.extend(uid, e.Clock.Now(), evictPause, most)
}

// evictionPlan is whom to evict of which node.
type evictionPlan struct {
	node string
	card int
	// leave are the victims that aren't leaving yet, victims all that have to be gone before the card is free.
	leave   []gpu.Pod
	victims []gpu.PodUID
}

// plan decides which pods leave one of the nodes for the pod, a slim one. false says that no card can be freed without
// breaking a disruption budget.
func (e *evictor) plan(pod *corev1.Pod, candidates []string) (evictionPlan, bool) {
	s := e.newSurvey(pod, pod.Spec.Resources.Requests)
	var names []string
	var nodes []preemption.Node
	outranked := e.ledger.Outranked(s.pod, candidates)
	if len(outranked) > maxPlans { // Other ones each time: those at the end are to have their turn too.
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

// evictable reports whether the pod is leaving, or the API server is expected to evict it: it evicts no pod with several
// budgets (pkg/registry/core/pod/storage/eviction.go), and what it refused lately it is likely to refuse again.
func (e *evictor) evictable(p preemption.Pod) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return p.Terminating || len(p.Budgets) < 2 && !e.spared.has(p.UID, e.Clock.Now())
}

// neverPreempts says whether the pod's policy lets nobody leave for it.
func neverPreempts(pod *corev1.Pod) bool {
	policy := pod.Spec.PreemptionPolicy
	return policy != nil && *policy == corev1.PreemptNever
}

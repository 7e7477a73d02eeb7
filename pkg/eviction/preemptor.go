package eviction

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
)

// Preemptors keeps the places of preemptors, which are pods for which cards of a node are being freed: until the pod is bound or deleted, doesn't
// take the cards, another pod takes them, a victim stays, or the leader's term ends. Mostly kube-scheduler has evicted the victims (see Tried).
//
// With --evict-fragmented it also finds pods that are pending only because of fragmentation: the node's sum has room for them, but too few cards
// have, mostly none. kube-scheduler counts by node. Up to 1.37 it finds no victim that would help, and sends no preempt call. The rules for the
// victims are those of preemption, but no disruption budget is violated. The Executor evicts them, and the next leader continues with its rounds.
//
// Its methods are safe for concurrent use; mu guards the fields below it.
type Preemptors struct {
	Options
	executor *Executor
	// fragmented is true if pods are evicted for pods that only fragmentation keeps pending.
	fragmented bool
	// requeue makes kube-scheduler retry the rejected pods.
	requeue func()

	mu         sync.Mutex
	blocked    map[gpu.PodUID]blockedPod
	preemptors map[gpu.PodUID]preemptor
	// proposals are the last answers to preempt calls, for a cycle.
	proposals map[gpu.PodUID]proposal
	// postponed holds the blocked pods for which no pods are evicted for a while.
	postponed queue.Pauses[gpu.PodUID]
}

// preemptor is a pod for which cards are freed. As long as it is one, the ledger keeps its place, as a nomination.
//
// It begins when victims are chosen for the Executor (begin) or those of a former leader's round still run (adopt), when filter is called with the
// node while victims of kube-scheduler are leaving it (Tried), or when kube-scheduler would evict such victims again (AwaitRepeated). First it waits
// for the end of its victims, then, from freedAt on, for its pod. It ends when the pod is bound or gone (Forget), when it fails (end), and with the
// term (resign).
type preemptor struct {
	pod     gpu.Pod
	node    string
	victims []gpu.PodUID
	// own is true if the Executor evicts the victims, false if kube-scheduler does.
	own bool
	// offered is when filter was called with the node while victims of kube-scheduler were leaving it; zero once TryWait has answered for that call.
	offered time.Time
	// freedAt is when all victims were gone; zero before.
	freedAt time.Time
	// nominated is the node of the pod's nomination when the preemptor began. It is node itself if kube-scheduler evicted the victims, else no
	// longer valid.
	nominated string
	// awaited is true if TryWait or AwaitRepeated has made kube-scheduler evict no other pods. Then the pod is requeued at the end.
	awaited bool
}

// evicting reports whether the Executor is still freeing the cards.
func (p *preemptor) evicting() bool { return p.own && p.freedAt.IsZero() }

// NewPreemptors returns Preemptors, which frees cards for fragmented pods if fragmented is true. requeue makes kube-scheduler retry the rejected
// pods; it must return at once. Preemptors evicts nothing before Run.
func NewPreemptors(x *Executor, fragmented bool, requeue func()) *Preemptors {
	e := &Preemptors{Options: x.Options, executor: x, fragmented: fragmented, requeue: requeue}
	e.clear()
	return e
}

// clear removes all state. The caller holds the lock, or Preemptors isn't used yet.
func (e *Preemptors) clear() {
	e.blocked, e.preemptors = map[gpu.PodUID]blockedPod{}, map[gpu.PodUID]preemptor{}
	e.postponed, e.proposals = queue.Pauses[gpu.PodUID]{}, map[gpu.PodUID]proposal{}
}

// Forget removes the pod, which is no longer pending.
func (e *Preemptors) Forget(uid gpu.PodUID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.blocked, uid)
	delete(e.preemptors, uid)
	delete(e.proposals, uid)
	delete(e.postponed, uid)
}

// Run evicts pods as needed until ctx ends.
func (e *Preemptors) Run(ctx context.Context) error {
	return background.Every(ctx, e.Clock, interval, e.Tick)
}

// Tick performs one step of Run, or gives up all places if this process isn't the leader.
func (e *Preemptors) Tick(ctx context.Context) {
	switch {
	case e.Leading() != nil:
		e.resign()
	case e.Cache.Ready() == nil:
		e.step(ctx)
	}
}

// resign gives up all places at the end of a term.
func (e *Preemptors) resign() {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.preemptors {
		e.endReservation(p.pod)
	}
	e.clear()
}

// begin reserves the cards, checks the victims by live reads and dry runs, and then evicts them. If no eviction was made, it gives the cards back. It
// reports whether this step must not try another pod: evictions have begun, no victim is left to evict, or the API server doesn't answer.
func (e *Preemptors) begin(ctx context.Context, plan plan) (done bool) {
	pod := plan.pod
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(pod.Namespace, pod.Name), "node", plan.node, "cards", plan.where.Cards())
	e.mu.Lock()
	_, blocked := e.blocked[pod.UID]
	_, under := e.preemptors[pod.UID]
	if blocked && !under {
		e.reserve(plan.preemptor)
	}
	e.mu.Unlock()
	if !blocked || under {
		return false // Filter has found a node meanwhile, or kube-scheduler evicts pods for it.
	}
	if len(plan.evictions.Victims) == 0 {
		return true // All victims are terminating already.
	}
	begun, err := e.evict(ctx, plan)
	e.Observer.Evicted(resultOf(err))
	if err != nil {
		what := "Not all victims evicted for a pod that only fragmentation keeps pending, trying again until the round ends"
		if !begun {
			what = "No victim evicted for a pod that only fragmentation keeps pending, trying again after a pause"
			e.cancel(pod.UID)
		}
		logger.Error(err, what, "result", resultOf(err))
		return begun || !answered(err)
	}
	logger.Info("Freeing a card for a pod that only fragmentation keeps pending", "evicted", len(plan.evictions.Victims))
	lacking := "no card has"
	if len(plan.where) > 1 {
		lacking = "too few cards have"
	}
	e.Recorder.Eventf(apiserver.Reference(pod), corev1.EventTypeNormal, EventEvicting,
		"Evicting %d pod(s) of lower priority from GPU %s of node %s: the node has enough free GPU memory, but %s",
		len(plan.evictions.Victims), plan.where, plan.node, lacking)
	return true
}

// evict makes the evictions of a plan. It reports whether a pod was evicted, or may have been.
func (e *Preemptors) evict(ctx context.Context, plan plan) (begun bool, err error) {
	if _, err := e.readUnbound(ctx, plan.pod); err != nil {
		return false, err
	}
	if err := e.executor.Check(ctx, plan.evictions.Victims); err != nil {
		return false, err
	}
	_, until, err := e.executor.Evict(ctx, plan.evictions, e.wantedFor(plan.pod.UID))
	return !until.IsZero(), err
}

// reserve begins or updates a preemptor: its place is kept. The caller holds the lock.
func (e *Preemptors) reserve(p preemptor) {
	e.preemptors[p.pod.UID] = p
	e.Ledger.Nominate(p.node, p.pod, p.victims...)
}

// wantedFor returns a function that returns the pod as long as its place is kept.
func (e *Preemptors) wantedFor(uid gpu.PodUID) Wanted {
	return func() map[gpu.PodUID]bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		if _, ok := e.preemptors[uid]; ok {
			return map[gpu.PodUID]bool{uid: true}
		}
		return nil
	}
}

// adopt continues the rounds of a former leader whose pods are still pending, and whose victims still have a lower priority.
func (e *Preemptors) adopt() {
	for _, inherited := range e.executor.Inherited(ByPriority) {
		w := inherited.For[0]
		info, known := e.Cache.Pod(w.Namespace, w.Name)
		p := preemptor{node: w.Node, own: true}
		lower := known
		for _, v := range inherited.Victims {
			for _, pod := range v.Pods {
				_, allocation, held := e.Ledger.Lookup(pod.UID)
				lower = lower && (!held || allocation.Priority < info.Priority)
				p.victims = append(p.victims, pod.UID)
			}
		}
		if known && info.UID == w.UID && info.Pending != nil && lower && e.fragmented {
			p.pod, p.nominated = info.Pod, info.NominatedNode
			e.mu.Lock()
			e.reserve(p)
			e.mu.Unlock()
			e.executor.Continue(inherited, e.wantedFor(w.UID))
		}
	}
}

// cancel ends a preemptor for which no pod was evicted.
func (e *Preemptors) cancel(uid gpu.PodUID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if p, ok := e.preemptors[uid]; ok {
		e.end(p, queue.Retry)
	}
}

// Renew reports whether a card is reserved for the preemptor, and renews that reservation, because kube-scheduler may
// have nominated the pod to another node since. A nomination that is newer than the preemptor takes precedence.
func (e *Preemptors) Renew(pod gpu.Pod, nominated string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	p, ok := e.preemptors[pod.UID]
	if !ok || nominated != "" && nominated != p.nominated {
		return false
	}
	p.pod = pod
	e.reserve(p) // Under the lock, so that the end of the preemptor removes it later.
	return true
}

// updatePreemptors finds out which victims are gone, and ends the preemptors whose places were of no use.
func (e *Preemptors) updatePreemptors() {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.Clock.Now()
	maps.DeleteFunc(e.proposals, func(_ gpu.PodUID, p proposal) bool { return now.Sub(p.at) >= cycle })
	for uid, p := range e.preemptors {
		slowest := e.slowest(p)
		if p.freedAt.IsZero() && slowest == gone {
			p.freedAt = now
			e.preemptors[uid] = p
		}
		if pause := e.failed(p, slowest, now); pause > 0 {
			e.end(p, pause)
		}
	}
}

// end ends a preemptor that has failed, and begins a pause of its pod. If kube-scheduler has evicted no other pods because of it, it must retry the
// pod now: the pod may be able to preempt elsewhere. The caller holds the lock.
func (e *Preemptors) end(p preemptor, pause time.Duration) {
	delete(e.preemptors, p.pod.UID)
	e.postponed.Extend(p.pod.UID, e.Clock.Now(), pause, queue.LongestPause)
	e.endReservation(p.pod)
	if p.awaited {
		e.requeue()
	}
}

// failed returns the minimum pause of the pod if its place was of no use, zero if it is still kept.
func (e *Preemptors) failed(p preemptor, slowest phase, now time.Time) time.Duration {
	freed := !p.freedAt.IsZero()
	switch {
	case !freed && slowest == overdue:
		return queue.LongestPause
	case !freed && slowest == running:
		return queue.Retry // The eviction failed, or was not made.
	case freed && !e.fits(p.pod, p.node):
		return queue.Retry // Another pod has taken the card, usually one of higher priority. The preemptor isn't at fault.
	case freed && now.Sub(p.freedAt) > queue.Arrival:
		return queue.LongestPause // Something unknown to the extender keeps the pod off the node.
	}
	return 0
}

// endReservation ends the reservation of the card. kube-scheduler's nomination of the pod, if it has one, applies again.
func (e *Preemptors) endReservation(pod gpu.Pod) {
	if known, ok := e.Cache.Pod(pod.Namespace, pod.Name); ok && known.UID == pod.UID && known.NominatedNode != "" {
		e.Ledger.Nominate(known.NominatedNode, pod)
		return
	}
	e.Ledger.End(ledger.Nominated, string(pod.UID))
}

// phase is how far a victim is.
type phase int

const (
	// overdue victims exist well after their deletion deadline, see protocol.Overdue.
	overdue phase = iota
	running
	// departing victims are being deleted, or are about to be.
	departing
	gone
)

// slowest returns the lowest phase of the victims of a preemptor. Those that the Executor or kube-scheduler is about to evict are departing. The
// caller holds the lock.
func (e *Preemptors) slowest(p preemptor) phase {
	slowest := gone
	proposed := e.proposed(p.pod.UID)[p.node].Pods
	for _, uid := range p.victims {
		is := e.phase(p.node, uid)
		if is == running && (e.executor.Tries(uid) || slices.Contains(proposed, uid)) {
			is = departing
		}
		slowest = min(slowest, is)
	}
	return slowest
}

// phase returns how far a victim on the node is. One without GPU memory is only in the cache, and one that was bound just now only in the ledger.
func (e *Preemptors) phase(node string, uid gpu.PodUID) phase {
	_, allocation, held := e.Ledger.Lookup(uid)
	info, known := e.Cache.Pod(allocation.Namespace, allocation.Name)
	if !held {
		pods := e.Cache.PodsOn(node)
		i := slices.IndexFunc(pods, func(pod *clustercache.PodInfo) bool { return pod.UID == uid && !pod.Ended })
		if i < 0 {
			return gone
		}
		info, known = pods[i], true
	}
	known = known && info.UID == uid
	switch {
	case known && info.Overdue(e.Clock.Now()):
		return overdue
	case held && allocation.Leaving, known && info.Leaving:
		return departing
	}
	return running
}

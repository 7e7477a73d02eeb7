package eviction

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/queue"
)

// Preemptors are the pods for which cards of a node are being freed. It keeps their places until the pod is bound or deleted, doesn't take the cards,
// another pod takes them, a victim stays, or the leader's term ends. kube-scheduler evicts the victims (preemptions.go), or the Executor does
// (fragmentation.go).
//
// Its methods are safe for concurrent use; mu guards the fields below it, and is never held during a call to the API server.
type Preemptors struct {
	evictor
	executor *Executor
	// requeue makes kube-scheduler retry the rejected pods.
	requeue func()
	// evictFragmented is true if pods are evicted for those that only fragmentation keeps pending.
	evictFragmented bool

	mu  sync.Mutex
	all map[gpu.PodUID]*preemptor
	// proposals are the last answers to preempt calls, for a cycle.
	proposals map[gpu.PodUID]proposal
	// blocked are the pods for which cards may be freed because of fragmentation, and paused those for which that isn't tried for a while.
	blocked map[gpu.PodUID]blockedPod
	paused  queue.Pauses[gpu.PodUID]
}

// preemptor is a pod for which cards are freed. As long as it is one, the ledger keeps its place, as a nomination.
//
// It begins when victims were chosen because of fragmentation (begin), when groups give up a place (TakePlace), when filter is called with the node while
// victims of kube-scheduler are leaving it (KeepOfferedNode), or when kube-scheduler would evict such victims again (KeepIfRepeated). First it waits for
// the end of its victims, then, from freedAt on, for its pod. It ends when the pod is bound or gone (Forget), when it fails (end), and with the term
// (resign).
type preemptor struct {
	pod     gpu.Pod
	node    string
	victims []gpu.PodUID
	// own is true if the Executor evicts the victims, false if kube-scheduler does.
	own bool
	// offered is when filter was called with the node while victims of kube-scheduler were leaving it; zero once VictimsSuffice has answered for that call.
	offered time.Time
	// freedAt is when all victims were gone; zero before.
	freedAt time.Time
	// nominated is the node of the pod's nomination when the preemptor began. It is node itself if kube-scheduler evicted the victims, else no
	// longer valid.
	nominated string
	// awaited is true if VictimsSuffice, KeepIfRepeated or OnlyTakenPlace has made kube-scheduler evict no other pods. Then the pod is requeued at the end.
	awaited bool
}

// evicting reports whether the Executor is still freeing the cards.
func (p *preemptor) evicting() bool { return p.own && p.freedAt.IsZero() }

// NewPreemptors returns Preemptors. evictFragmented makes them evict pods for those that only fragmentation keeps pending. requeue makes kube-scheduler
// retry the rejected pods; it must return at once.
func NewPreemptors(x *Executor, evictFragmented bool, requeue func()) *Preemptors {
	ps := &Preemptors{evictor: x.evictor, executor: x, evictFragmented: evictFragmented, requeue: requeue}
	ps.clear()
	return ps
}

// clear removes all state. The caller holds the lock, or the Preemptors aren't used yet.
func (ps *Preemptors) clear() {
	ps.all, ps.proposals = map[gpu.PodUID]*preemptor{}, map[gpu.PodUID]proposal{}
	ps.blocked, ps.paused = map[gpu.PodUID]blockedPod{}, queue.Pauses[gpu.PodUID]{}
}

// Forget removes the pod, which is no longer pending.
func (ps *Preemptors) Forget(uid gpu.PodUID) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	delete(ps.all, uid)
	delete(ps.proposals, uid)
	delete(ps.blocked, uid)
	delete(ps.paused, uid)
}

// Run gives up places and evicts pods as needed until ctx ends.
func (ps *Preemptors) Run(ctx context.Context) error {
	return background.Every(ctx, ps.Clock, interval, ps.Tick)
}

// Tick performs one step of Run, or gives up all places if this process isn't the leader.
func (ps *Preemptors) Tick(ctx context.Context) {
	switch {
	case ps.Leading() != nil:
		ps.resign()
	case ps.Cache.Ready() == nil:
		ps.update()
		if ps.evictFragmented && ps.Cache.BudgetsSynced() {
			ps.freeCards(ctx)
		}
	}
}

// resign gives up all places at the end of a term.
func (ps *Preemptors) resign() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	for _, p := range ps.all {
		ps.endReservation(p.pod)
	}
	ps.clear()
}

// reserve begins or updates a preemptor: its place is kept. The caller holds the lock.
func (ps *Preemptors) reserve(p *preemptor) {
	ps.all[p.pod.UID] = p
	ps.Ledger.Nominate(p.node, p.pod, p.victims...)
}

// TakePlace keeps the place on the node that groups have given up for the pod: it is a preemptor without victims.
func (ps *Preemptors) TakePlace(pod *clustercache.PodInfo, node string) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.reserve(&preemptor{pod: pod.Pod, node: node, nominated: pod.NominatedNode, freedAt: ps.Clock.Now()})
}

// OnlyTakenPlace removes the other nodes from the proposal of a preempt call if it names one on which TakePlace keeps a place for the pod: it needs no
// memory of other pods. kube-scheduler retries the pod when the binds of the groups' members are rejected, or when the victims on that node have ended.
func (ps *Preemptors) OnlyTakenPlace(pod *clustercache.PodInfo, proposed map[string]preemption.Victims) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.all[pod.UID]
	if p == nil || len(p.victims) > 0 || !slices.Contains([]string{"", p.nominated, p.node}, pod.NominatedNode) {
		return
	}
	if _, offered := proposed[p.node]; offered {
		p.awaited = true
		maps.DeleteFunc(proposed, func(node string, _ preemption.Victims) bool { return node != p.node })
	}
}

// Renew reports whether a card is reserved for the preemptor, and renews that reservation, because kube-scheduler may
// have nominated the pod to another node since. A nomination that is newer than the preemptor takes precedence.
func (ps *Preemptors) Renew(pod gpu.Pod, nominated string) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p, ok := ps.all[pod.UID]
	if !ok || nominated != "" && nominated != p.nominated {
		return false
	}
	p.pod = pod
	ps.reserve(p) // Under the lock, so that the end of the preemptor removes it later.
	return true
}

// update finds out which victims are gone, and ends the preemptors whose places were of no use.
func (ps *Preemptors) update() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	now := ps.Clock.Now()
	ps.paused.Prune(now, queue.LongestPause)
	maps.DeleteFunc(ps.proposals, func(_ gpu.PodUID, p proposal) bool { return now.Sub(p.at) >= cycle })
	for _, p := range ps.all {
		slowest := ps.slowest(p)
		if p.freedAt.IsZero() && slowest == gone {
			p.freedAt = now
		}
		if pause := ps.uselessPause(p, slowest, now); pause > 0 {
			ps.end(p, pause)
		}
	}
}

// end ends a preemptor that has failed, and begins a pause of its pod. If kube-scheduler has evicted no other pods because of it, it must retry the
// pod now: the pod may be able to preempt elsewhere. The caller holds the lock.
func (ps *Preemptors) end(p *preemptor, pause time.Duration) {
	delete(ps.all, p.pod.UID)
	ps.paused.Extend(p.pod.UID, ps.Clock.Now(), pause, queue.LongestPause)
	ps.endReservation(p.pod)
	if p.awaited {
		ps.requeue()
	}
}

// uselessPause returns the minimum pause of the pod if its place was of no use, zero if it is still kept.
func (ps *Preemptors) uselessPause(p *preemptor, slowest phase, now time.Time) time.Duration {
	freed := !p.freedAt.IsZero()
	switch {
	case !freed && slowest == overdue:
		return queue.LongestPause
	case !freed && slowest == running:
		return queue.Retry // The eviction failed, or was not made.
	case freed && !ps.fits(p.pod, p.node):
		return queue.Retry // Another pod has taken the card, usually one of higher priority. The preemptor isn't at fault.
	case freed && now.Sub(p.freedAt) > queue.ArrivalTimeout:
		return queue.LongestPause // Something unknown to the extender keeps the pod off the node.
	}
	return 0
}

// endReservation ends the reservation of the card. kube-scheduler's nomination of the pod, if it has one, applies again.
func (ps *Preemptors) endReservation(pod gpu.Pod) {
	if known := ps.cached(pod); known != nil && known.NominatedNode != "" {
		ps.Ledger.Nominate(known.NominatedNode, pod)
		return
	}
	ps.Ledger.End(ledger.Nominated, string(pod.UID))
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
func (ps *Preemptors) slowest(p *preemptor) phase {
	slowest := gone
	proposed := ps.proposed(p.pod.UID)[p.node].Pods
	for _, uid := range p.victims {
		is := ps.phase(p.node, uid)
		if is == running && (ps.executor.IsEvicting(uid) || slices.Contains(proposed, uid)) {
			is = departing
		}
		slowest = min(slowest, is)
	}
	return slowest
}

// phase returns how far a victim on the node is. One without GPU memory is only in the cache, and one that was bound just now only in the ledger.
func (ps *Preemptors) phase(node string, uid gpu.PodUID) phase {
	_, allocation, held := ps.Ledger.Lookup(uid)
	info := ps.cached(allocation.Pod)
	if !held {
		pods := ps.Cache.PodsOn(node)
		i := slices.IndexFunc(pods, func(pod *clustercache.PodInfo) bool { return pod.UID == uid && !pod.Ended })
		if i < 0 {
			return gone
		}
		info = pods[i]
	}
	switch {
	case info != nil && info.Overdue(ps.Clock.Now()):
		return overdue
	case allocation.Leaving, info != nil && info.Leaving:
		return departing
	}
	return running
}

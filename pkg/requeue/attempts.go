package requeue

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
)

// minFeasibleNodesToFind is the smallest sample of feasible nodes to which kube-scheduler limits itself (pkg/scheduler/schedule_one.go). If it
// sends fewer, they are no sample: they are all the nodes that passed its own filters.
const minFeasibleNodesToFind = 100

// This file requeues pods whose scheduling attempt failed, or may have failed, although a node has room. The next attempt can
// succeed without a change of the cluster, but without one kube-scheduler makes none for minutes. There are two causes:
//
//   - kube-scheduler sent a sample of its nodes (percentageOfNodesToScore), and no card of these nodes has room. The
//     next attempt uses the next nodes.
//   - filter named only the best of the nodes that fit, and a later step rejected them: another extender, or a plugin
//     that runs before the bind. For the next attempt filter names every node that fits.
//
// The first pause is ledger.TentativeLifetime: a bind follows a filter call much sooner, and kube-scheduler's own back-off takes about as long.
// One write requeues every rejected pod, so it is an attempt for all, and the pauses of all grow. Pods are forgotten when
// they are bound or deleted.

// triedPod is what is kept of such a pod.
type triedPod struct {
	state state
	// due is when the pod is requeued next; zero in the state allNamed.
	due   time.Time
	pause time.Duration
	// sample is the number of candidate nodes of the call that rejected the pod, in the states with a sample.
	sample int
	tries  int
}

// state is the result of the latest filter calls for a pod. The pod's next bind ends it.
type state uint8

const (
	// unknown pods aren't kept.
	unknown state = iota
	// fewNamed: filter named only some of the nodes that fit. The pod is requeued if kube-scheduler rejects it.
	fewNamed
	// allNamed: filter was called again, and from now on names every node that fits. The pod isn't requeued.
	allNamed
	// sampled: filter found no node in a sample. The pod is requeued if another node has room.
	sampled
	// sampledAll is sampled for a pod for which filter names every node that fits.
	sampledAll

	states
)

// event is what changes the state of a pod.
type event uint8

const (
	// called: filter is called, and asks whether it must name every node that fits.
	called event = iota
	// noneInSample: filter found no node for the pod in a sample.
	noneInSample
	// passed: filter found nodes, and named all of them; passedPartly: it named some.
	passed
	passedPartly
	// ended: a bind call for the pod has arrived, or the pod is bound or gone.
	ended

	events
)

// transitions are the states that follow each state.
var transitions = [events][states]state{
	//             unknown   fewNamed  allNamed    sampled   sampledAll
	called:       {unknown, allNamed, allNamed, sampled, sampledAll},
	noneInSample: {sampled, sampled, sampledAll, sampled, sampledAll},
	passed:       {unknown, fewNamed, allNamed, unknown, allNamed},
	passedPartly: {fewNamed, fewNamed, fewNamed, fewNamed, fewNamed},
	ended:        {unknown, unknown, unknown, unknown, unknown},
}

// handle changes the pod's state by an event, and returns the new state. sample is the number of candidate nodes of a sample. The caller holds mu.
func (r *Requeuer) handle(uid gpu.PodUID, e event, sample int) state {
	from := r.tried[uid].state
	to := transitions[e][from]
	switch to {
	case from:
	case unknown:
		delete(r.tried, uid)
	case allNamed:
		r.tried[uid] = triedPod{state: to}
	default:
		makeRoom(r.tried)
		r.tried[uid] = triedPod{state: to, due: r.Clock.Now().Add(ledger.TentativeLifetime), pause: ledger.TentativeLifetime, sample: sample}
	}
	return to
}

// RetrySamples requeues all pods if that helps one that is due: one that was rejected on a sample, or for which only some nodes passed. Run calls it
// in each writeInterval.
func (r *Requeuer) RetrySamples() {
	due := map[gpu.PodUID]triedPod{}
	r.mu.Lock()
	now := r.Clock.Now()
	for uid, pod := range r.tried {
		if !pod.due.IsZero() && !pod.due.After(now) {
			due[uid] = pod
		}
	}
	r.mu.Unlock()
	if len(due) == 0 {
		return
	}
	node, helps := "", false
	if r.Leading() == nil { // Otherwise another replica receives the filter calls and keeps its own list.
		node, helps = r.judge(due)
	}
	if helps {
		r.RequeueAll(node)
	}
	r.postpone(helps)
}

// judge drops due pods that a requeue cannot help, and reports whether a requeue may help one of the others. node is
// the node to change; it is empty for any node.
func (r *Requeuer) judge(due map[gpu.PodUID]triedPod) (node string, helps bool) {
	for _, uid := range slices.Sorted(maps.Keys(due)) {
		pod, pending := r.Cache.PendingPod(uid)
		switch {
		case !pending:
		case due[uid].state == fewNamed:
			if pod.Pending.Rejected {
				return "", true
			}
			continue
		default:
			if node, helps = r.Ledger.FirstFit(pod.Pod, r.EligibleNodes(pod.Constraints)); helps {
				return node, true
			}
		}
		r.drop(uid, due[uid])
	}
	return "", false
}

// drop forgets the pod, unless its state has changed since.
func (r *Requeuer) drop(uid gpu.PodUID, was triedPod) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.tried[uid] == was {
		delete(r.tried, uid)
	}
}

// postpone sets the next due times, and counts an attempt: of every pod after a requeue, else of those that were due.
func (r *Requeuer) postpone(requeued bool) {
	nodes := len(r.Cache.Nodes())
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.Clock.Now()
	for uid, pod := range r.tried {
		if pod.due.IsZero() || !requeued && pod.due.After(now) {
			continue
		}
		pod.tries++
		// kube-scheduler begins each sample where the last one ended, whichever pod that was for. Therefore every node is
		// likely to have been in a sample of this pod only after twice as many attempts.
		if pod.state == fewNamed || pod.tries > 2*(nodes/pod.sample+1) {
			pod.pause = min(2*pod.pause, queue.KubeSchedulerRetries)
		}
		pod.due = now.Add(pod.pause)
		r.tried[uid] = pod
	}
}

package requeue

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
)

// minFeasibleNodesToFind is the smallest sample of feasible nodes to which kube-scheduler limits itself (pkg/scheduler/schedule_one.go). If it
// sends fewer, they are no sample: they are all the nodes that passed its own filters.
const minFeasibleNodesToFind = 100

// attempts requeues pods whose scheduling attempt failed, or may have failed, although a node has room. The next attempt can
// succeed without a change of the cluster, but without one kube-scheduler makes none for minutes. There are two causes:
//
//   - kube-scheduler sent a sample of its nodes (percentageOfNodesToScore), and no card of these nodes has room. The
//     next attempt uses the next nodes.
//   - filter named only the best of the nodes that fit, and a later step rejected them: another extender, or a plugin
//     that runs before the bind. For the next attempt filter names every node that fits.
//
// The first pause is ledger.TentativeLifetime: a bind follows a filter call much sooner, and kube-scheduler's own back-off takes about as long.
// One write requeues every rejected pod, so it is an attempt for all, and the pauses of all grow. Pods are forgotten when
// they are bound or deleted. Its methods are safe for concurrent use; mu guards the fields below it.
type attempts struct {
	Options
	// requeue makes kube-scheduler retry every rejected pod by a change of the node. An empty node means any node.
	requeue func(node string)

	mu   sync.Mutex
	pods map[gpu.PodUID]triedPod
}

// triedPod is what is kept of a pod.
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

// handle changes the pod's state by an event, and returns the new state. sample is the number of candidate nodes of a sample.
func (a *attempts) handle(uid gpu.PodUID, e event, sample int) state {
	a.mu.Lock()
	defer a.mu.Unlock()
	from := a.pods[uid].state
	to := transitions[e][from]
	switch to {
	case from:
	case unknown:
		delete(a.pods, uid)
	case allNamed:
		a.pods[uid] = triedPod{state: to}
	default:
		a.add(uid, triedPod{state: to, pause: ledger.TentativeLifetime, sample: sample})
	}
	return to
}

// add adds the pod, which becomes due after its pause. The caller holds mu.
func (a *attempts) add(uid gpu.PodUID, pod triedPod) {
	makeRoom(a.pods)
	pod.due = a.Clock.Now().Add(pod.pause)
	a.pods[uid] = pod
}

// round requeues all pods if that helps one that is due. Run makes one in each writeInterval.
func (a *attempts) round() {
	due := map[gpu.PodUID]triedPod{}
	a.mu.Lock()
	now := a.Clock.Now()
	for uid, pod := range a.pods {
		if !pod.due.IsZero() && !pod.due.After(now) {
			due[uid] = pod
		}
	}
	a.mu.Unlock()
	if len(due) == 0 {
		return
	}
	node, requeued := "", false
	if a.Leading() == nil { // Otherwise another replica receives the filter calls and keeps its own list.
		node, requeued = a.judge(due)
	}
	if requeued {
		a.requeue(node)
	}
	a.postpone(requeued)
}

// judge drops due pods that a requeue cannot help, and reports whether a requeue may help one of the others. node is
// the node to change; it is empty for any node.
func (a *attempts) judge(due map[gpu.PodUID]triedPod) (node string, helps bool) {
	for _, uid := range slices.Sorted(maps.Keys(due)) {
		pod, pending := a.Cache.PendingPod(uid)
		switch {
		case !pending:
		case due[uid].state == fewNamed:
			if pod.Pending.Rejected {
				return "", true
			}
			continue
		default:
			if node, helps = a.roomFor(pod); helps {
				return node, true
			}
		}
		a.drop(uid, due[uid])
	}
	return "", false
}

// drop forgets the pod, unless its state has changed since.
func (a *attempts) drop(uid gpu.PodUID, was triedPod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pods[uid] == was {
		delete(a.pods, uid)
	}
}

// postpone sets the next due times, and counts an attempt: of every pod after a requeue, else of those that were due.
func (a *attempts) postpone(requeued bool) {
	nodes := len(a.Cache.Nodes())
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.Clock.Now()
	for uid, pod := range a.pods {
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
		a.pods[uid] = pod
	}
}

// roomFor returns a node on which the pod would find a card and that the pod's spec allows.
func (a *attempts) roomFor(pod *clustercache.PodInfo) (string, bool) {
	return a.Ledger.FirstFit(pod.Pod, a.EligibleNodes(pod.Constraints))
}

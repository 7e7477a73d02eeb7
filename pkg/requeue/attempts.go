package requeue

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
)

const (
	// minSample is the smallest sample of feasible nodes to which kube-scheduler limits itself
	// (pkg/scheduler/schedule_one.go, minFeasibleNodesToFind). If it sends fewer, they are
	// no sample: they are all the nodes that passed its own filters.
	minSample = 100
	// attemptPause is the first pause before a pod is requeued. A bind follows a filter call much sooner, and
	// kube-scheduler's own back-off takes about as long. maxAttemptPause is the longest pause: after that time
	// kube-scheduler retries every pod by itself (pkg/scheduler/backend/queue,
	// DefaultPodMaxInUnschedulablePodsDuration).
	attemptPause    = 2 * time.Second
	maxAttemptPause = 5 * time.Minute
	// attemptInterval is the minimum time between two rounds.
	attemptInterval = time.Second
)

// attempts requeues pods whose scheduling attempt failed, or may have failed, although a node has room. The next attempt can
// succeed without a change of the cluster, so kube-scheduler makes none for minutes. There are two causes:
//
//   - kube-scheduler sent a sample of its nodes (percentageOfNodesToScore), and no card of these nodes has room. The
//     next attempt uses the next nodes.
//   - filter named only the best of the nodes that fit, and a later step rejected them: another extender, or a plugin
//     that runs before the bind. For the next attempt filter names every node that fits.
//
// One write requeues every rejected pod, so it is an attempt for all, and the pauses of all grow. Pods are forgotten when
// they are bound or deleted. Its methods are safe for concurrent use; mu guards the fields below it.
type attempts struct {
	Options
	// requeue makes kube-scheduler retry every rejected pod by a change of the node. An empty node means any node.
	requeue func(node string)
	begun   chan struct{}

	mu   sync.Mutex
	pods map[gpu.PodUID]triedPod
	// until is the time of run's next round; zero while no pod is due.
	until time.Time
}

// triedPod is the state that is kept for a pod.
type triedPod struct {
	// due is when the pod is requeued next; zero for never.
	due   time.Time
	pause time.Duration
	// sample is the number of candidate nodes of the call that rejected the pod; 0 if filter named only some of the nodes.
	sample int
	tries  int
	// nameAll is true if filter names every node that fits.
	nameAll bool
}

// sampled records that filter found no node for the pod among the candidate nodes of one call.
func (a *attempts) sampled(uid gpu.PodUID, candidates int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if known := a.pods[uid]; candidates >= minSample && known.sample == 0 {
		a.note(uid, triedPod{pause: attemptPause, sample: candidates, nameAll: known.nameAll})
	}
}

// namedFew records that filter named only some of the nodes that fit the pod.
func (a *attempts) namedFew(uid gpu.PodUID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.note(uid, triedPod{pause: attemptPause})
}

// mustNameAll implements Requeuer.NameAll.
func (a *attempts) mustNameAll(uid gpu.PodUID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	known, again := a.pods[uid]
	if !again || known.sample > 0 {
		return known.nameAll
	}
	a.pods[uid] = triedPod{nameAll: true} // This is another filter call without a bind in between.
	return true
}

// passed records that filter found a node for the pod.
func (a *attempts) passed(uid gpu.PodUID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch known := a.pods[uid]; {
	case known.nameAll:
		a.pods[uid] = triedPod{nameAll: true}
	case known.sample > 0:
		delete(a.pods, uid)
	}
}

// forget records that a bind call for the pod has arrived, or that the pod is bound or gone.
func (a *attempts) forget(uid gpu.PodUID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.pods, uid)
}

// note adds the pod, which becomes due after its pause. The caller holds mu.
func (a *attempts) note(uid gpu.PodUID, pod triedPod) {
	if _, again := a.pods[uid]; !again && len(a.pods) >= maxRejected {
		for other := range a.pods {
			delete(a.pods, other) // Any of them: with so many, most do not exist.
			break
		}
	}
	pod.due = a.Clock.Now().Add(pod.pause)
	a.pods[uid] = pod
	if a.until.IsZero() || pod.due.Before(a.until) {
		select {
		case a.begun <- struct{}{}:
		default:
		}
	}
}

// run requeues pods when they are due, until ctx ends.
func (a *attempts) run(ctx context.Context) error {
	for {
		var due <-chan time.Time
		if pause, some := a.sleep(); some {
			due = a.Clock.After(pause)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-a.begun:
		case <-due:
			a.round()
		}
	}
}

// sleep returns the time until the next pod is due, at least attemptInterval. some is false if no pod will be due.
func (a *attempts) sleep() (pause time.Duration, some bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.until = time.Time{}
	for _, pod := range a.pods {
		if !pod.due.IsZero() && (a.until.IsZero() || pod.due.Before(a.until)) {
			a.until = pod.due
		}
	}
	if a.until.IsZero() {
		return 0, false
	}
	now := a.Clock.Now()
	if soonest := now.Add(attemptInterval); a.until.Before(soonest) {
		a.until = soonest
	}
	return a.until.Sub(now), true
}

// round requeues all pods if that helps one that is due.
func (a *attempts) round() {
	requeued := false
	defer func() { a.postpone(requeued) }()
	if a.Leading() != nil {
		return // Another replica receives the filter calls and keeps its own list.
	}
	a.mu.Lock()
	now := a.Clock.Now()
	due := maps.Clone(a.pods)
	maps.DeleteFunc(due, func(_ gpu.PodUID, pod triedPod) bool { return pod.due.IsZero() || pod.due.After(now) })
	a.mu.Unlock()
	node, helps := a.judge(due)
	if helps {
		a.requeue(node)
		requeued = true
	}
}

// judge drops due pods that a requeue cannot help, and reports whether a requeue may help one of the others. node is
// the node to change; it is empty for any node.
func (a *attempts) judge(due map[gpu.PodUID]triedPod) (node string, helps bool) {
	var sampled []*clustercache.PodInfo
	var requests []gpu.Pod
	for uid, was := range due {
		pod, pending := a.Cache.PendingPod(uid)
		switch {
		case !pending:
			a.end(uid, was)
		case was.sample > 0:
			sampled, requests = append(sampled, pod), append(requests, pod.Pod)
		case pod.Pending.Rejected:
			helps = true
		}
	}
	if helps || len(sampled) == 0 {
		return "", helps
	}
	// If none of many pods fits any node, this one check is enough.
	_, some := a.Ledger.AnyFit(leastOf(requests))
	for i, pod := range sampled {
		if some {
			if node, helps = a.roomFor(pod); helps {
				return node, true
			}
		}
		a.end(requests[i].UID, due[requests[i].UID])
	}
	return "", false
}

// end drops the pod, unless its state has changed since.
func (a *attempts) end(uid gpu.PodUID, was triedPod) {
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
		// Attempts of other pods use nodes of the same rotation. Therefore every node is likely to have been in a
		// sample only after twice as many attempts.
		if pod.sample == 0 || pod.tries > 2*(nodes/pod.sample+1) {
			pod.pause = min(2*pod.pause, maxAttemptPause)
		}
		pod.due = now.Add(pod.pause)
		a.pods[uid] = pod
	}
}

// roomFor returns a node on which the pod would find a card and that the pod's spec allows.
func (a *attempts) roomFor(pod *clustercache.PodInfo) (string, bool) {
	var nodes []diagnosis.Node
	for _, name := range a.Ledger.Fitting(pod.Pod) {
		if node, ok := a.Cache.Node(name); ok && len(diagnosis.Closed(node, false)) == 0 {
			nodes = append(nodes, diagnosis.Node{Object: node})
		}
	}
	if eligible := diagnosis.EligibleNodes(nodes, pod.Pending); len(eligible) > 0 {
		return eligible[0], true
	}
	return "", false
}

package cluster

import (
	"context"
	"maps"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/waiting"
)

const (
	// minSample is the smallest number of nodes to which kube-scheduler limits its sample of feasible nodes
	// (pkg/scheduler/schedule_one.go, minFeasibleNodesToFind). If an extender receives fewer nodes, these are all that
	// passed kube-scheduler's own filters.
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

// attempts requeues pods whose scheduling attempt failed, or may have failed, although a node has room for them. The
// next attempt can succeed without a change of the cluster, so kube-scheduler has no reason for one for minutes. There
// are two causes:
//
//   - kube-scheduler sent a sample of its nodes (percentageOfNodesToScore), and no card of these nodes has room. The
//     next attempt uses the next nodes.
//   - filter named only the best of the nodes that fit, and a later step rejected them: another extender, or a plugin
//     that runs before the bind. For the next attempt filter names every node that fits.
//
// One write requeues every rejected pod, so each requeue is an attempt for all of them, and the pauses of all grow.
// Pods are forgotten when they are bound or deleted. Its methods are safe for concurrent use; mu guards the fields
// below it.
type attempts struct {
	clock clock.Clock
	// pending returns the pod if it is pending.
	pending func(gpu.PodUID) (*corev1.Pod, bool)
	// roomFor returns a node that has room for the pod and that the pod's spec allows.
	roomFor func(*corev1.Pod) (node string, ok bool)
	// anyFit returns a node on which the pod would find a card.
	anyFit func(gpu.Pod) (node string, ok bool)
	// requeue makes kube-scheduler retry every rejected pod by a change of the node. An empty node means any node.
	requeue func(node string)
	// nodes returns the number of nodes of the cluster.
	nodes func() int
	// leading returns an error if another process does this work.
	leading func() error
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
	// sample is the number of candidate nodes of the filter call that rejected the pod. It is 0 if filter named only
	// some of the nodes.
	sample int
	// tries counts the requeues.
	tries int
	// nameAll is true if filter names every node that fits.
	nameAll bool
}

func newAttempts(c *Cluster) *attempts {
	return &attempts{
		clock: c.Clock, pending: c.pending.object, roomFor: c.roomFor, anyFit: c.ledger.AnyFit, requeue: c.waker.call, nodes: c.countNodes, leading: c.leading,
		begun: make(chan struct{}, 1), pods: map[gpu.PodUID]triedPod{},
	}
}

// Sampled records that filter found no node for the pod among asked candidate nodes. These may be only some of the
// nodes that passed kube-scheduler's own filters. If so, and if another node has room, the pod is requeued soon.
func (c *Cluster) Sampled(uid gpu.PodUID, asked int) { c.attempts.sampled(uid, asked) }

// NamedFew records that filter accepted nodes for the pod but named only some of those that fit. A bind must follow.
func (c *Cluster) NamedFew(uid gpu.PodUID) { c.attempts.namedFew(uid) }

// NameAll reports whether filter must name every node that fits the pod, because no bind followed the call in which it
// named only some.
func (c *Cluster) NameAll(uid gpu.PodUID) bool { return c.attempts.mustNameAll(uid) }

func (a *attempts) sampled(uid gpu.PodUID, asked int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if known := a.pods[uid]; asked >= minSample && known.sample == 0 {
		a.note(uid, triedPod{pause: attemptPause, sample: asked, nameAll: known.nameAll})
	}
}

func (a *attempts) namedFew(uid gpu.PodUID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.note(uid, triedPod{pause: attemptPause})
}

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
	if _, again := a.pods[uid]; !again && len(a.pods) >= maxRefused {
		for other := range a.pods {
			delete(a.pods, other) // Any of them: with so many, most do not exist.
			break
		}
	}
	pod.due = a.clock.Now().Add(pod.pause)
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
			due = a.clock.After(pause)
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
	now := a.clock.Now()
	if soonest := now.Add(attemptInterval); a.until.Before(soonest) {
		a.until = soonest
	}
	return a.until.Sub(now), true
}

// round requeues all pods if that helps one that is due.
func (a *attempts) round() {
	requeued := false
	defer func() { a.postpone(requeued) }()
	if a.leading() != nil {
		return // Another replica receives the filter calls and keeps its own list.
	}
	a.mu.Lock()
	now := a.clock.Now()
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
	var sampled []*corev1.Pod
	var requests []gpu.Pod
	for uid, was := range due {
		pod, waits := a.pending(uid)
		switch {
		case !waits:
			a.end(uid, was)
		case was.sample > 0:
			sampled, requests = append(sampled, pod), append(requests, protocol.Pod(pod))
		case rejected(pod):
			helps = true
		}
	}
	if helps || len(sampled) == 0 {
		return "", helps
	}
	// If none of many pods fits any node, this one check is enough.
	_, some := a.anyFit(leastOf(requests))
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

// rejected reports whether kube-scheduler has marked the pod as unschedulable.
func rejected(pod *corev1.Pod) bool {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled {
			return condition.Status == corev1.ConditionFalse
		}
	}
	return false
}

// end drops the pod, unless its state has changed since.
func (a *attempts) end(uid gpu.PodUID, was triedPod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.pods[uid] == was {
		delete(a.pods, uid)
	}
}

// postpone sets the next due time of the pods. After a requeue it counts an attempt for every pod; otherwise only for
// the pods that were due.
func (a *attempts) postpone(requeued bool) {
	nodes := a.nodes()
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.clock.Now()
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
func (c *Cluster) roomFor(pod *corev1.Pod) (string, bool) {
	names := c.ledger.Fitting(protocol.Pod(pod))
	places := make([]waiting.Node, 0, len(names))
	for _, name := range names {
		node, err := c.nodes.Get(name)
		if err != nil || len(waiting.Closed(node, false)) > 0 {
			continue
		}
		places = append(places, waiting.Node{Object: node})
	}
	if reach := waiting.EligibleNodes(places, pod); len(reach) > 0 {
		return reach[0], true
	}
	return "", false
}

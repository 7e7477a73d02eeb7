package scheduling

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// With percentageOfNodesToScore below 100, kube-scheduler stops looking for nodes when it has found enough of them, and a filter call has
// only a sample of the nodes that it would pass (k8s.io/kubernetes pkg/scheduler/schedule_one.go, numFeasibleNodesToFind). In a large
// cluster this saves most of its work. The sample begins where the last one ended, so every node is in one in turn.
//
// Mostly a sample has room. If it has none while a node outside has, the pod is rejected, nominated to that node, and requeued:
// kube-scheduler evaluates a nominated node before all others. Until then no pod is evicted for it.

const (
	// steerDelay is how long after a rejection the pod is nominated: kube-scheduler writes the pod's condition first, and the write of
	// the nomination would meet a conflict.
	steerDelay = 200 * time.Millisecond
	// steerPause is the time between two attempts to nominate a pod, and steerTries their maximum number.
	steerPause = 500 * time.Millisecond
	steerTries = 8
)

// steering is the nomination of a pod to a node outside the sample that rejected it.
type steering struct {
	// node is the node of a group member's place. It is empty for a single pod, whose node is chosen when it is nominated.
	node string
	// due is when it is tried next.
	due   time.Time
	tries int
}

// sampled reports whether the candidate nodes of a filter call can be a sample.
func (s *Scheduler) sampled(nodes []string) bool {
	return s.SmallestSample > 0 && len(nodes) >= s.SmallestSample
}

// roomOutside reports whether a node outside the sample has room for a pod that the sample has no room for. If the pod was nominated,
// kube-scheduler has just rejected that node.
func (s *Scheduler) roomOutside(object *corev1.Pod, nodes []string) bool {
	return s.sampled(nodes) && s.requeue.RoomOutside(gpu.PodUID(object.UID), object.Status.NominatedNodeName)
}

// steer begins to nominate the pod to a node outside the sample, if it can be nominated. The requeuer tries again later.
func (s *Scheduler) steer(uid gpu.PodUID) {
	if pod, pending := s.cache.PendingPod(uid); pending {
		s.nominator.steer(pod, steerDelay)
	}
}

// aboutToBeSteered reports whether a sample had no room for the pod, and a node outside has.
func (s *Scheduler) aboutToBeSteered(object *corev1.Pod) bool {
	uid := gpu.PodUID(object.UID)
	return s.SmallestSample > 0 && s.requeue.RejectedOnSample(uid) && s.requeue.RoomOutside(uid, object.Status.NominatedNodeName)
}

// eligibleCache keeps the eligible nodes of pods with equal constraints for a moment. mu guards the fields below it.
type eligibleCache struct {
	mu    sync.Mutex
	until time.Time
	nodes []diagnosis.Node
	names map[unique.Handle[string]][]string
}

// eligibleLife is how long eligible nodes are kept. kube-scheduler checks each node again.
const eligibleLife = time.Second

// of returns the eligible nodes of the pod. The caller must not change them.
func (c *eligibleCache) of(pod *clustercache.PodInfo, nodes func() []diagnosis.Node, now time.Time) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !now.Before(c.until) {
		c.nodes, c.names, c.until = nodes(), map[unique.Handle[string]][]string{}, now.Add(eligibleLife)
	}
	names, known := c.names[pod.Constraints]
	if !known {
		names = diagnosis.EligibleNodesFor(c.nodes, pod.Constraints.Value())
		c.names[pod.Constraints] = names
	}
	return names
}

// outsideToo returns the nodes that a plan for a member's group can use: those of the filter call, or all eligible ones if the call has
// a sample, or only the node to which the member is nominated. If kube-scheduler has rejected the latter, it is left out.
func (s *Scheduler) outsideToo(object *corev1.Pod, nodes []string) []string {
	nominated := object.Status.NominatedNodeName
	alone := len(nodes) == 1 && nodes[0] == nominated
	if s.SmallestSample == 0 || !alone && !s.sampled(nodes) {
		return nodes
	}
	pod, pending := s.cache.PendingPod(gpu.PodUID(object.UID))
	if !pending || pod.Member == nil || pod.Member.Gang.Native || constrained(pod) {
		return nodes
	}
	all := s.eligible.of(pod, s.diagnosisNodes, s.Clock.Now())
	if at := slices.Index(all, nominated); at >= 0 && !slices.Contains(nodes, nominated) {
		all = slices.Delete(slices.Clone(all), at, at+1)
	}
	return all
}

// steer begins to nominate a single pod, after the delay, to a node outside the sample that rejected it. It reports whether the pod can
// be nominated.
func (n *nominator) steer(pod *clustercache.PodInfo, delay time.Duration) bool {
	if n == nil || excluded(pod) || constrained(pod) {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, begun := n.steerings[pod.UID]; !begun {
		n.steerings[pod.UID] = steering{due: n.clock.Now().Add(delay)}
	}
	return true
}

// steerMember begins to nominate a member of a group to the node of its place, unless that is in progress. If the node is empty, the
// member is not nominated any more.
func (n *nominator) steerMember(uid gpu.PodUID, node string) {
	if node == "" {
		n.passed(uid)
		return
	}
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.steerings[uid].node != node {
		n.steerings[uid] = steering{node: node, due: n.clock.Now().Add(steerDelay)}
	}
}

// passed ends the attempts to nominate a pod that a filter call has found nodes for.
func (n *nominator) passed(uid gpu.PodUID) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.steerings, uid)
}

// steered reports whether the pod was nominated to a node outside the sample that rejected it.
func (n *nominator) steered(uid gpu.PodUID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[uid]
	return p != nil && p.steered
}

// steerAll nominates the pods that are due.
func (n *nominator) steerAll(ctx context.Context) {
	singles, members := n.dueSteerings()
	for _, pod := range members {
		node := n.nodeOf(pod.UID)
		n.start(func() { n.write(ctx, pod, node) })
	}
	if len(singles) > 0 {
		n.nominate(ctx, singles, 0)
	}
}

// dueSteerings returns the pods to nominate now, and marks them. Each is tried again until it is nominated.
func (n *nominator) dueSteerings() (singles, members []*clustercache.PodInfo) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.clock.Now()
	for _, uid := range slices.SortedFunc(maps.Keys(n.steerings), cmp.Compare[gpu.PodUID]) {
		s := n.steerings[uid]
		if now.Before(s.due) {
			continue
		}
		s.due, s.tries = now.Add(steerPause), s.tries+1
		n.steerings[uid] = s
		pod, pending := n.cache.PendingPod(uid)
		p := n.pods[uid]
		busy := p != nil && (p.state == writing || p.state == nominated)
		if !pending || s.tries > steerTries || p != nil && p.steered && p.state == nominated && (s.node == "" || s.node == p.node) {
			delete(n.steerings, uid)
			continue
		}
		if busy || pod.NominatedNode != "" { // kube-scheduler removes a nomination to a node that it rejected.
			continue
		}
		if p == nil {
			p = &queuedPod{}
			n.pods[uid] = p
		}
		p.PodInfo, p.state, p.steered, p.node, p.at = pod, writing, true, s.node, now
		if s.node == "" {
			singles = append(singles, pod)
		} else {
			members = append(members, pod)
		}
	}
	return singles, members
}

// nodeOf returns the node to which the pod is nominated.
func (n *nominator) nodeOf(uid gpu.PodUID) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	if p := n.pods[uid]; p != nil {
		return p.node
	}
	return ""
}

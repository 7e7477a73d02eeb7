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
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
)

// With percentageOfNodesToScore below 100, kube-scheduler stops when it has found enough nodes. A filter call then has only a sample of the
// nodes that kube-scheduler's own filters would pass (k8s.io/kubernetes pkg/scheduler/schedule_one.go, numFeasibleNodesToFind). In a large
// cluster this saves most of its work. Each sample begins where the last one ended, so every node is in a sample sooner or later.
//
// Usually a sample has room. If it has none but another node has, filter rejects the pod, and the pod is nominated to that node and
// requeued. kube-scheduler evaluates a nominated node before all others. Until then, for at most queue.Retry, no pod is evicted for it. If the
// nomination isn't made in that time, or kube-scheduler rejects the node, nominations don't help: kube-scheduler has a reason that is
// unknown here. Then, for queue.KubeSchedulerRetries, a sample counts as all nodes for this pod, and the pod is requeued as long as any node seems to have
// room (see requeue.Requeuer.Rejected).

const (
	// steerDelay is the time between the rejection of a pod and its nomination. During this time kube-scheduler writes the pod's condition;
	// an earlier write of the nomination would get a conflict. It is also the time between two attempts to nominate a pod, and between two searches
	// for nodes.
	steerDelay = 200 * time.Millisecond
	// maxSteered is the maximum number of single pods of one search.
	maxSteered = 200
)

// steering is the nomination of a pod to a node outside the sample that rejected it.
type steering struct {
	// node is the node of a group member's place. It is empty for a single pod, whose node is chosen when it is nominated.
	node string
	// due is when it is tried next, until is when it is given up.
	due, until time.Time
}

// samples keeps the size of the smallest sample until a node changes; 0 if it isn't known. mu guards it.
type samples struct {
	mu   sync.Mutex
	size int
}

// nodesChanged drops the size. The cluster cache must have the change already.
func (c *samples) nodesChanged() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.size = 0
}

// sampled reports whether the candidate nodes of a filter call can be a sample.
func (s *Scheduler) sampled(nodes []string) bool {
	if s.SampleSize == nil {
		return false
	}
	c := &s.samples
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.size == 0 {
		all := len(s.cache.Nodes())
		c.size = s.SampleSize(all - all/20) // kube-scheduler's watch may show some nodes less than the watch of this process.
	}
	return len(nodes) >= c.size
}

// steer starts the nomination of a pod that a filter call has rejected, if the call had a sample and another node has room. It reports whether
// it has started one.
func (s *Scheduler) steer(object *corev1.Pod, nodes []string) bool {
	if !s.sampled(nodes) {
		return false
	}
	pod, pending := s.cache.PendingPod(gpu.PodUID(object.UID))
	if !pending || !s.nominator.steerable(pod, object, nodes) || pod.Member != nil || pod.NeverPreempts || !s.requeue.HasRoom(pod) {
		return false
	}
	s.nominator.steer(pod.UID, "")
	return true
}

// outsideToo returns the nodes that a plan for a member's group can use: the nodes of the filter call; all eligible nodes if the call has
// a sample; or only the node to which the member was nominated because it was outside a sample.
func (s *Scheduler) outsideToo(object *corev1.Pod, nodes []string) []string {
	if s.SampleSize == nil {
		return nodes
	}
	uid := gpu.PodUID(object.UID)
	alone := len(nodes) == 1 && nodes[0] == object.Status.NominatedNodeName && s.nominator.steered(uid)
	pod, pending := s.cache.PendingPod(uid)
	if !pending || pod.Member == nil || pod.Member.Gang.Native || pod.NeverPreempts || !alone && !s.sampled(nodes) || !s.nominator.steerable(pod, object, nodes) {
		return nodes
	}
	return s.nodes.Names(pod.Constraints)
}

// steerable reports whether the pod can be nominated to a node outside the sample. If the pod has such a nomination and the node isn't a
// candidate, then either kube-scheduler has rejected the node, or filter has rejected it because other pods took the room.
func (n *nominator) steerable(pod *clustercache.PodInfo, object *corev1.Pod, nodes []string) bool {
	if constrained(pod) {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	p, node := n.pods[pod.UID], object.Status.NominatedNodeName
	if p != nil && p.node == node && node != "" && !slices.Contains(nodes, node) {
		if p.taken {
			p.taken = false
		} else {
			n.refuse(pod)
		}
	}
	return !n.clock.Now().Before(n.refused[refusedKey(pod)])
}

// refusedPods are the pods for which a nomination was refused: all members of a group with equal constraints, or a single pod.
type refusedPods struct {
	group       gang.Key
	constraints unique.Handle[string]
	uid         gpu.PodUID
}

func refusedKey(pod *clustercache.PodInfo) refusedPods {
	if pod.Member != nil {
		return refusedPods{group: pod.Member.Gang, constraints: pod.Constraints}
	}
	return refusedPods{uid: pod.UID}
}

// refuse records that nominations don't help such a pod. The caller holds the lock.
func (n *nominator) refuse(pod *clustercache.PodInfo) {
	now := n.clock.Now()
	maps.DeleteFunc(n.refused, func(_ refusedPods, until time.Time) bool { return now.After(until) })
	n.refused[refusedKey(pod)] = now.Add(queue.KubeSchedulerRetries)
	delete(n.steerings, pod.UID)
}

// steer begins to nominate a pod to the node of its place, or, if node is empty, to any node that has room, unless that is in progress.
func (n *nominator) steer(uid gpu.PodUID, node string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if s, begun := n.steerings[uid]; !begun || s.node != node {
		now := n.clock.Now()
		n.steerings[uid] = steering{node: node, due: now.Add(steerDelay), until: now.Add(queue.Retry)}
	}
}

// steerMember begins to nominate a group's member to the node of its place. If the node is empty, filter found no such place.
func (n *nominator) steerMember(uid gpu.PodUID, node string) {
	switch {
	case node == "":
		n.passed(uid)
	case n != nil:
		n.steer(uid, node)
	}
}

// passed ends the attempts to nominate a pod, because a filter call has found nodes for it.
func (n *nominator) passed(uid gpu.PodUID) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.steerings, uid)
}

// steers reports whether the pod is about to be nominated to a node outside the sample that rejected it.
func (n *nominator) steers(uid gpu.PodUID) bool {
	if n == nil {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	_, begun := n.steerings[uid]
	return begun
}

// steered reports whether the pod was nominated to a node outside the sample that rejected it.
func (n *nominator) steered(uid gpu.PodUID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pods[uid] != nil
}

// rejected records that filter rejects the candidate nodes. If the only candidate is the node to which the pod was nominated, either other pods
// have taken the room, or the member's place has moved.
func (n *nominator) rejected(uid gpu.PodUID, nodes []string) {
	if n == nil || len(nodes) != 1 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if p := n.pods[uid]; p != nil && p.node == nodes[0] {
		p.taken = true
	}
}

// steerAll nominates the pods that are due. Pods for which that isn't possible are requeued, since no pod was evicted for them.
func (n *nominator) steerAll(ctx context.Context) {
	singles, members, refused := n.dueSteerings()
	for _, m := range members {
		n.start(func() { n.write(ctx, m.PodInfo, m.node) })
	}
	if len(singles) > 0 {
		refused = n.nominate(ctx, singles) || refused
	}
	if refused {
		n.requeue("")
	}
}

// placedMember is a member of a group with the node of its place.
type placedMember struct {
	*clustercache.PodInfo
	node string
}

// dueSteerings returns the pods to nominate now, and marks them. refused is true if one was given up.
func (n *nominator) dueSteerings() (singles []*clustercache.PodInfo, members []placedMember, refused bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.clock.Now()
	if len(n.steerings) == 0 || now.Before(n.searched.Add(steerDelay)) {
		return nil, nil, false
	}
	n.searched = now
	for _, uid := range slices.SortedFunc(maps.Keys(n.steerings), cmp.Compare[gpu.PodUID]) {
		s, p := n.steerings[uid], n.pods[uid]
		pod, pending := n.cache.PendingPod(uid)
		switch {
		case !pending, p != nil && p.state == nominated && (s.node == "" || s.node == p.node):
			delete(n.steerings, uid)
			continue
		case now.After(s.until), now.Before(n.paused):
			n.refuse(pod)
			refused = true
			continue
		case now.Before(s.due), p != nil && (p.state == writing || p.state == nominated), pod.NominatedNode != "", len(singles) == maxSteered:
			continue // kube-scheduler removes a nomination to a node that it rejected.
		}
		s.due = now.Add(steerDelay)
		n.steerings[uid] = s
		if p == nil {
			p = &nominatedPod{}
			n.pods[uid] = p
		}
		p.PodInfo, p.state, p.taken, p.node, p.at = pod, writing, false, s.node, now
		if s.node == "" {
			singles = append(singles, pod)
		} else {
			members = append(members, placedMember{pod, s.node})
		}
	}
	return singles, members, refused
}

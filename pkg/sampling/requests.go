package sampling

import (
	"context"
	"maps"
	"slices"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
)

const (
	// delay is the time between the rejection of a pod and its nomination. During this time kube-scheduler writes the pod's condition;
	// an earlier write of the nomination would get a conflict. It is also the time between two attempts to nominate a pod, and between two searches
	// for nodes.
	delay = 200 * time.Millisecond
	// maxSingles is the maximum number of single pods of one search.
	maxSingles = 200
	// partOfRequests is how many requests are looked through while the lock is held once: filter and event handlers wait for it.
	partOfRequests = 1024
)

// request is a nomination that is to be made.
type request struct {
	// node is the node of a group member's place. It is empty for a single pod, whose node is chosen when it is nominated.
	node string
	// due is when it is tried next, until is when it is given up.
	due, until time.Time
}

// NodesChanged records that the number of nodes may have changed. The cluster cache must have the change already.
func (n *Nominator) NodesChanged() {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.size = 0
}

// isSample reports whether the candidate nodes of a filter call can be a sample.
func (n *Nominator) isSample(nodes []string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.size == 0 {
		all := len(n.Cache.Nodes())
		n.size = n.SampleSize(all - all/20) // kube-scheduler's watch may show some nodes less than the watch of this process.
	}
	return len(nodes) >= n.size
}

// Request requests the nomination of a pod that a filter call has rejected, if the call had a sample and another node has room. It reports
// whether it has.
func (n *Nominator) Request(object *corev1.Pod, nodes []string) bool {
	if n == nil || !n.isSample(nodes) {
		return false
	}
	pod, pending := n.Cache.PendingPod(gpu.PodUID(object.UID))
	if !pending || !n.helps(pod, object, nodes) || pod.Member != nil || pod.NeverPreempts || !n.HasRoom(pod) {
		return false
	}
	n.add(pod.UID, "")
	return true
}

// Offered returns the nodes that a plan for a member's group can use: the nodes of the filter call; all eligible nodes if the call has
// a sample; or only the node to which the member was nominated because it was outside a sample.
func (n *Nominator) Offered(object *corev1.Pod, nodes []string) []string {
	if n == nil {
		return nodes
	}
	pod, pending := n.Cache.PendingPod(gpu.PodUID(object.UID))
	if !pending || pod.Member == nil || pod.Member.Gang.Native || pod.NeverPreempts {
		return nodes
	}
	nominated := len(nodes) == 1 && nodes[0] == object.Status.NominatedNodeName && n.knows(pod.UID)
	if !nominated && !n.isSample(nodes) || !n.helps(pod, object, nodes) {
		return nodes
	}
	return n.Nodes.Names(pod.Constraints)
}

// helps reports whether a nomination to a node outside the sample can help the pod. If the pod has such a nomination and the node isn't a
// candidate, then either kube-scheduler has rejected the node, or filter has rejected it because other pods took the room.
func (n *Nominator) helps(pod *clustercache.PodInfo, object *corev1.Pod, nodes []string) bool {
	if pod.Constrained() {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	p, node := n.pods[pod.UID], object.Status.NominatedNodeName
	if p != nil && p.node == node && node != "" && !slices.Contains(nodes, node) {
		if p.taken {
			p.taken = false
		} else {
			n.giveUp(pod)
		}
	}
	return !n.Clock.Now().Before(n.givenUp[givenUpKeyOf(pod)])
}

// givenUpKey are the pods that nominations help alike: all members of a group with equal constraints, or a single pod.
type givenUpKey struct {
	group       gang.Key
	constraints unique.Handle[string]
	uid         gpu.PodUID
}

func givenUpKeyOf(pod *clustercache.PodInfo) givenUpKey {
	if pod.Member != nil {
		return givenUpKey{group: pod.Member.Gang, constraints: pod.Constraints}
	}
	return givenUpKey{uid: pod.UID}
}

// giveUp records that nominations don't help such a pod. The caller holds the lock.
func (n *Nominator) giveUp(pod *clustercache.PodInfo) {
	now := n.Clock.Now()
	maps.DeleteFunc(n.givenUp, func(_ givenUpKey, until time.Time) bool { return now.After(until) })
	n.givenUp[givenUpKeyOf(pod)] = now.Add(queue.KubeSchedulerRetries)
	delete(n.requests, pod.UID)
}

// add requests the nomination of a pod to the node of its place, or, if node is empty, to any node that has room, unless that is in progress.
func (n *Nominator) add(uid gpu.PodUID, node string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r, begun := n.requests[uid]; !begun || r.node != node {
		now := n.Clock.Now()
		n.requests[uid] = request{node: node, due: now.Add(delay), until: now.Add(queue.Retry)}
	}
}

// RequestMember requests the nomination of a group's member to the node of its place. If the node is empty, filter found no such place.
func (n *Nominator) RequestMember(uid gpu.PodUID, node string) {
	switch {
	case node == "":
		n.Passed(uid)
	case n != nil:
		n.add(uid, node)
	}
}

// Passed ends the attempts to nominate a pod, because a filter call has found nodes for it.
func (n *Nominator) Passed(uid gpu.PodUID) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.requests, uid)
}

// Requested reports whether the pod is about to be nominated to a node outside the sample that rejected it.
func (n *Nominator) Requested(uid gpu.PodUID) bool {
	if n == nil {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	_, begun := n.requests[uid]
	return begun
}

// knows reports whether the pod was nominated to a node outside the sample that rejected it.
func (n *Nominator) knows(uid gpu.PodUID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pods[uid] != nil
}

// Rejected records that filter rejects the candidate nodes. If the only candidate is the node to which the pod was nominated, either other pods
// have taken the room, or the member's place has moved.
func (n *Nominator) Rejected(uid gpu.PodUID, nodes []string) {
	if n == nil || len(nodes) != 1 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if p := n.pods[uid]; p != nil && p.node == nodes[0] {
		p.taken = true
	}
}

// nominateDue nominates the pods that are due. Pods for which that isn't possible are requeued, since no pod was evicted for them.
func (n *Nominator) nominateDue(ctx context.Context) {
	var d dueRequests
	uids := n.requested()
	slices.Sort(uids)
	for part := range slices.Chunk(uids, partOfRequests) {
		n.addDue(&d, part)
	}
	for _, m := range d.members {
		n.start(func() { n.write(ctx, m.PodInfo, m.node) })
	}
	givenUp := d.givenUp
	if len(d.singles) > 0 {
		givenUp = n.nominate(ctx, d.singles) || givenUp
	}
	if givenUp {
		n.Requeue("")
	}
}

// dueRequests are the pods to nominate now.
type dueRequests struct {
	singles []*clustercache.PodInfo
	members []nominatedPod
	// givenUp is true if one was given up.
	givenUp bool
}

// requested returns the pods to nominate if it is time to look through them.
func (n *Nominator) requested() []gpu.PodUID {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.Clock.Now()
	if len(n.requests) == 0 || now.Before(n.searched.Add(delay)) {
		return nil
	}
	n.searched = now
	return slices.AppendSeq(make([]gpu.PodUID, 0, len(n.requests)), maps.Keys(n.requests))
}

// addDue adds those of the requested pods that are to be nominated now, and marks them.
func (n *Nominator) addDue(d *dueRequests, uids []gpu.PodUID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.Clock.Now()
	for _, uid := range uids {
		r, requested := n.requests[uid]
		p := n.pods[uid]
		pod, pending := n.Cache.PendingPod(uid)
		switch {
		case !requested:
			continue
		case !pending, p != nil && p.state == nominated && (r.node == "" || r.node == p.node):
			delete(n.requests, uid)
			continue
		case now.After(r.until), now.Before(n.paused):
			n.giveUp(pod)
			d.givenUp = true
			continue
		case now.Before(r.due), p != nil && (p.state == writing || p.state == nominated), pod.NominatedNode != "", len(d.singles) == maxSingles:
			continue // kube-scheduler removes a nomination to a node that it rejected.
		}
		r.due = now.Add(delay)
		n.requests[uid] = r
		if p == nil {
			p = &nominatedPod{}
			n.pods[uid] = p
		}
		p.PodInfo, p.state, p.taken, p.node, p.at = pod, writing, false, r.node, now
		if r.node == "" {
			d.singles = append(d.singles, pod)
		} else {
			d.members = append(d.members, *p)
		}
	}
}

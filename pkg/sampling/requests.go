package sampling

import (
	"cmp"
	"maps"
	"slices"
	"time"
	"unique"

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
	// maxDue is the maximum number of pods of one search.
	maxDue = 200
)

// request is a nomination that is to be made.
type request struct {
	// node is the node of a group member's place. It is empty for a single pod, whose node is chosen when it is nominated.
	node string
	// due is when it is tried next, until is when it is given up.
	due, until time.Time
}

// isSample reports whether the candidate nodes of a filter call can be a sample.
func (n *Nominator) isSample(nodes []string) bool {
	if n.SampleSize == nil {
		return false
	}
	all := len(n.Cache.Nodes())
	return len(nodes) >= n.SampleSize(all-all/20) // kube-scheduler's watch may show some nodes less than the watch of this process.
}

// Request requests the nomination of a pod that a filter call has rejected, if the call had a sample and another node has room. It reports
// whether it has.
func (n *Nominator) Request(pod *clustercache.PodInfo, nodes []string) bool {
	if !n.isSample(nodes) || !n.helps(pod, nodes) || pod.Member != nil || pod.NeverPreempts {
		return false
	}
	if _, room := n.Ledger.FirstFit(pod.Pod, n.Nodes.UsableNodes(pod.Constraints)); !room {
		return false
	}
	n.RequestNode(pod.UID, "")
	return true
}

// Offered returns the nodes that a plan for a member's group can use: the nodes of the filter call; all eligible nodes if the call has
// a sample; or only the node to which the member was nominated because it was outside a sample.
func (n *Nominator) Offered(pod *clustercache.PodInfo, nodes []string) []string {
	if pod.Member == nil || pod.Member.Gang.Native || pod.NeverPreempts {
		return nodes
	}
	nominated := len(nodes) == 1 && nodes[0] == pod.NominatedNode && n.pod(pod.UID) != (nominatedPod{})
	if !nominated && !n.isSample(nodes) || !n.helps(pod, nodes) {
		return nodes
	}
	return n.Nodes.UsableNodes(pod.Constraints)
}

// helps reports whether a nomination to a node outside the sample can help the pod, which must be pending here too. If the pod has such a
// nomination and the node isn't a candidate, then either kube-scheduler has rejected the node, or filter has rejected it because other pods took the
// room.
func (n *Nominator) helps(pod *clustercache.PodInfo, nodes []string) bool {
	if _, pending := n.Cache.PendingPod(pod.UID); !pending || pod.Constrained() {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	p, node := n.pods[pod.UID], pod.NominatedNode
	if p != nil && p.node == node && node != "" && !slices.Contains(nodes, node) {
		if p.rejected {
			p.rejected = false
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

// RequestNode requests the nomination of a pod to the node, that of its place in a group's plan, or, if node is empty, to any node that has room, unless
// that is in progress.
func (n *Nominator) RequestNode(uid gpu.PodUID, node string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r, begun := n.requests[uid]; !begun || r.node != node {
		now := n.Clock.Now()
		n.requests[uid] = request{node: node, due: now.Add(delay), until: now.Add(queue.Retry)}
	}
}

// Passed ends the attempts to nominate a pod, because a filter call has found nodes for it, or no place outside the sample.
func (n *Nominator) Passed(uid gpu.PodUID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.requests, uid)
}

// Requested reports whether the pod is about to be nominated to a node outside the sample that rejected it.
func (n *Nominator) Requested(uid gpu.PodUID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, begun := n.requests[uid]
	return begun
}

// Rejected records that filter rejects the candidate nodes. If the only candidate is the node to which the pod was nominated, either other pods
// have taken the room, or the member's place has moved.
func (n *Nominator) Rejected(uid gpu.PodUID, nodes []string) {
	if len(nodes) != 1 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if p := n.pods[uid]; p != nil && p.node == nodes[0] {
		p.rejected = true
	}
}

// takeDue returns the pods that are to be nominated now, those with the highest priority first, with the nodes of members' places. givenUp is
// true if another request was given up.
func (n *Nominator) takeDue() (due []choice, givenUp bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.Clock.Now()
	if len(n.requests) == 0 || now.Before(n.searched.Add(delay)) {
		return nil, false
	}
	n.searched = now
	for _, pod := range n.requested() {
		r, p := n.requests[pod.UID], n.pods[pod.UID]
		switch {
		case p != nil && p.state == nominated && (r.node == "" || r.node == p.node):
			delete(n.requests, pod.UID)
		case now.After(r.until), now.Before(n.paused):
			n.giveUp(pod)
			givenUp = true
		case now.Before(r.due), p != nil && p.state != done, pod.NominatedNode != "", len(due) == maxDue:
			// Later. kube-scheduler removes a nomination to a node that it rejected.
		default:
			r.due = now.Add(delay)
			n.requests[pod.UID] = r
			n.pods[pod.UID] = &nominatedPod{state: writing, node: r.node, at: now}
			due = append(due, choice{pod, r.node})
		}
	}
	return due, givenUp
}

// requested returns the pending pods with requests, and drops requests of others. The caller holds the lock.
func (n *Nominator) requested() []*clustercache.PodInfo {
	pods := make([]*clustercache.PodInfo, 0, len(n.requests))
	for uid := range n.requests {
		if pod, pending := n.Cache.PendingPod(uid); pending {
			pods = append(pods, pod)
		} else {
			delete(n.requests, uid)
		}
	}
	slices.SortFunc(pods, func(a, b *clustercache.PodInfo) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.UID, b.UID))
	})
	return pods
}

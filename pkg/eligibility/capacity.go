package eligibility

import (
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Capacity counts what nodes have free besides GPU memory, as kube-scheduler does, for plans of gangs and for fair sharing. It is used for a
// few successive decisions only: it reads a node when the node is first used, and doesn't detect later changes. It implements
// ledger.Capacity and reclaim.Capacity, and is not safe for concurrent use.
type Capacity struct {
	amounts *freeAmounts
	planned func(node string) []gpu.PodUID
	empty   bool
	nodes   map[string]*nodeCapacity
}

// nodeCapacity is the count of one node.
type nodeCapacity struct {
	*nodeFree
	// pods are the pods that count beside those of nodeFree: planned, or taken.
	pods []*PodUse
	// returned are the pods that returned what they had.
	returned []gpu.PodUID
	// evicted are the bound pods that count as gone.
	evicted []*PodUse
	// taken is what pods use, less what evicted used.
	taken Amounts
}

// Capacity returns a Capacity that counts the pods on the nodes, and the pending pods that planned returns for each node. planned can be nil.
// If empty is true, it counts only pods that ask for no GPU memory, such as those of a DaemonSet, because these are expected to stay.
func (c *Cluster) Capacity(planned func(node string) []gpu.PodUID, empty bool) *Capacity {
	if planned == nil || empty {
		planned = func(string) []gpu.PodUID { return nil }
	}
	return &Capacity{amounts: &c.free, planned: planned, empty: empty, nodes: map[string]*nodeCapacity{}}
}

// Take implements ledger.Capacity. A pod that isn't pending any more takes nothing.
func (c *Capacity) Take(name string, uid gpu.PodUID) bool {
	pod, pending := c.amounts.pending(uid)
	if !pending {
		return true
	}
	n := c.node(name)
	if n == nil {
		return false
	}
	if i := slices.Index(n.returned, uid); i >= 0 {
		n.returned = slices.Delete(n.returned, i, i+1)
	} else if !c.fits(n, pod) {
		return false
	}
	n.add(pod)
	return true
}

// Return implements ledger.Capacity.
func (c *Capacity) Return(name string, uid gpu.PodUID) {
	n := c.node(name)
	if n == nil {
		return
	}
	i := indexOf(n.pods, uid)
	if i < 0 {
		return
	}
	addUse(n.taken, n.pods[i], -1)
	n.pods = slices.Delete(n.pods, i, i+1)
	n.returned = append(n.returned, uid)
}

// Evict implements reclaim.Capacity.
func (c *Capacity) Evict(name string, uid gpu.PodUID) {
	n := c.node(name)
	if n == nil {
		return
	}
	if pod := c.amounts.boundTo(name, uid); pod != nil && indexOf(n.evicted, uid) < 0 {
		addUse(n.taken, pod, -1)
		n.evicted = append(n.evicted, pod)
	}
}

// Restore implements reclaim.Capacity.
func (c *Capacity) Restore(name string, uid gpu.PodUID) bool {
	n := c.node(name)
	if n == nil {
		return false
	}
	i := indexOf(n.evicted, uid)
	if i < 0 {
		return true
	}
	pod := n.evicted[i]
	n.evicted = slices.Delete(n.evicted, i, i+1)
	addUse(n.taken, pod, 1)
	for name := range pod.uses() {
		left, listed := c.left(n, name)
		needed := slices.ContainsFunc(n.pods, func(other *PodUse) bool { return other.Use(name) > 0 })
		if listed && left < 0 && needed {
			return false
		}
	}
	return true
}

// add counts a pod that is planned or taken.
func (n *nodeCapacity) add(pod *PodUse) {
	addUse(n.taken, pod, 1)
	n.pods = append(n.pods, pod)
}

// left returns what all pods leave of a resource; false if the node doesn't list it.
func (c *Capacity) left(n *nodeCapacity, name corev1.ResourceName) (amount int64, listed bool) {
	free := n.free
	if c.empty {
		free = n.withoutGPU
	}
	amount, listed = free[name]
	return amount - n.taken[name], listed
}

// fits reports whether the node has enough of each resource that the pod requests. It ignores other resources, even if the node's pods use too
// much of them (k8s.io/kubernetes pkg/scheduler/framework/plugins/noderesources/fit.go, fitsRequest).
func (c *Capacity) fits(n *nodeCapacity, pod *PodUse) bool {
	for name, need := range pod.uses() {
		left, listed := c.left(n, name)
		switch {
		case need == 0:
		case !listed && c.empty:
			return false
		case !listed:
			// The node doesn't list this resource, but is a candidate node. So kube-scheduler doesn't count the resource: another extender
			// or a driver provides it. If the node is outside the sample, kube-scheduler may reject it; the scheduling package handles that.
		case need > left-c.nominatedUse(n, pod, name):
			return false
		}
	}
	return true
}

// nominatedUse returns what the pods use of a resource that are nominated to the node, and count there for the pod.
func (c *Capacity) nominatedUse(n *nodeCapacity, pod *PodUse, name corev1.ResourceName) (sum int64) {
	if c.empty {
		return 0
	}
	for _, other := range n.nominated {
		if other.CountsFor(pod) && indexOf(n.pods, other.UID) < 0 {
			sum += other.Use(name)
		}
	}
	return sum
}

// node returns the count of the node; nil if there is no such node.
func (c *Capacity) node(name string) *nodeCapacity {
	n, known := c.nodes[name]
	if known {
		return n
	}
	if free, pending := c.amounts.of(name, c.planned(name)); free != nil {
		n = &nodeCapacity{nodeFree: free, taken: Amounts{}}
		for _, pod := range pending {
			n.add(pod)
		}
	}
	c.nodes[name] = n
	return n
}

// indexOf returns the position of the pod, or -1.
func indexOf(pods []*PodUse, uid gpu.PodUID) int {
	return slices.IndexFunc(pods, func(pod *PodUse) bool { return pod.UID == uid })
}

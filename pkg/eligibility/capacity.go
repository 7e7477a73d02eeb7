package eligibility

import (
	"math"
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

	// resources are those that the pods so far request and that nodes list. GPU memory is not among them, since the ledger counts it.
	resources Resources
	nodes     map[string]*nodeCapacity
	// latest is the latest pod, and needs are the amounts of resources that it requests. others are what else it requests: each pod of many can
	// request different resources that no node has.
	latest *PodUse
	needs  []int64
	others []corev1.ResourceName
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
	// left is what all pods leave of the resources. It has the resources that were known when it was last computed.
	left []int64
}

// Capacity returns a Capacity that counts the pods on the nodes, and the pending pods that planned returns for each node. planned can be nil.
// If empty is true, it counts only pods that ask for no GPU memory, such as those of a DaemonSet, because these are expected to stay.
func (c *Cluster) Capacity(planned func(node string) []gpu.PodUID, empty bool) *Capacity {
	if planned == nil || empty {
		planned = func(string) []gpu.PodUID { return nil }
	}
	return &Capacity{
		amounts: &c.free, planned: planned, empty: empty,
		resources: Resources{corev1.ResourcePods}, nodes: map[string]*nodeCapacity{},
	}
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
	n.pods = append(n.pods, pod)
	c.count(n, pod, -1)
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
	c.count(n, n.pods[i], 1)
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
		c.count(n, pod, 1)
		n.evicted = append(n.evicted, pod)
	}
}

// Restore implements reclaim.Capacity.
func (c *Capacity) Restore(name string, uid gpu.PodUID) (fits bool) {
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
	c.count(n, pod, -1)
	fits = true
	for i := range n.left {
		fits = fits && (n.left[i] >= 0 || c.resources.Use(i, pod) == 0)
	}
	return fits
}

// count adds what the pod uses to what is left on the node, times sign.
func (c *Capacity) count(n *nodeCapacity, pod *PodUse, sign int64) {
	for i := range n.left {
		n.left[i] += sign * c.resources.Use(i, pod)
	}
}

// fits reports whether the node has enough of each resource that the pod requests. It ignores other resources, even if the node's pods use too
// much of them (k8s.io/kubernetes pkg/scheduler/framework/plugins/noderesources/fit.go, fitsRequest).
func (c *Capacity) fits(n *nodeCapacity, pod *PodUse) bool {
	c.learn(n, pod)
	c.update(n)
	if c.empty && len(c.others) > 0 {
		return false // The node doesn't have them.
	}
	for i, need := range c.needs {
		left := n.left[i]
		if !c.empty {
			for _, other := range n.nominated {
				if other.CountsFor(pod) && indexOf(n.pods, other.UID) < 0 {
					left -= c.resources.Use(i, other)
				}
			}
		}
		if need > 0 && need > left {
			return false
		}
	}
	return true
}

// learn computes what the pod needs, and adds its resources to those that are counted if the node lists them.
func (c *Capacity) learn(n *nodeCapacity, pod *PodUse) {
	if c.latest != pod {
		c.latest, c.needs, c.others = pod, c.resources.Uses(pod), nil
		for name, amount := range pod.Requests {
			if !slices.Contains(c.resources, name) && amount > 0 {
				c.others = append(c.others, name)
			}
		}
	}
	if len(c.others) == 0 {
		return // Nearly always.
	}
	c.others = slices.DeleteFunc(c.others, func(name corev1.ResourceName) bool {
		_, listed := n.free[name]
		if listed {
			c.resources = append(c.resources, name)
		}
		return listed
	})
	c.needs = c.resources.Uses(pod)
}

// update computes what is left on the node of the resources that were added since the last call.
func (c *Capacity) update(n *nodeCapacity) {
	for i := len(n.left); i < len(c.resources); i++ {
		free, listed := n.free[c.resources[i]]
		switch {
		case c.empty:
			free = n.withoutGPU[c.resources[i]]
		case !listed:
			// The node doesn't list this resource, but is a candidate node. So kube-scheduler doesn't count the resource: another extender
			// or a driver provides it. If the node is outside the sample, kube-scheduler may reject it; the scheduling package handles that.
			free = math.MaxInt64 / 2
		}
		for _, pod := range n.pods {
			free -= c.resources.Use(i, pod)
		}
		for _, pod := range n.evicted {
			free += c.resources.Use(i, pod)
		}
		n.left = append(n.left, free)
	}
}

// node returns the count of the node; nil if there is no such node.
func (c *Capacity) node(name string) *nodeCapacity {
	n, known := c.nodes[name]
	if known {
		return n
	}
	if free, pending := c.amounts.of(name, c.planned(name)); free != nil {
		n = &nodeCapacity{nodeFree: free, pods: pending}
	}
	c.nodes[name] = n
	return n
}

// indexOf returns the position of the pod, or -1.
func indexOf(pods []*PodUse, uid gpu.PodUID) int {
	return slices.IndexFunc(pods, func(pod *PodUse) bool { return pod.UID == uid })
}

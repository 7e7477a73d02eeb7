package eligibility

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// Cluster knows which nodes pods can use, and what nodes have free besides GPU memory: CPU, memory, pods, extended resources. Event handlers
// tell it all nodes that share their cards, and all pods. Its methods are safe for concurrent use. They call no other package's code with a
// lock held, so they may be called with any lock held.
type Cluster struct {
	usable usableNodes
	free   freeAmounts
}

// NewCluster returns a Cluster without nodes and pods.
func NewCluster() *Cluster { return &Cluster{usable: newUsableNodes(), free: newFreeAmounts()} }

// SetNode adds or updates a node that shares its cards. spec is what Spec returns for the object.
func (c *Cluster) SetNode(object *corev1.Node, spec *ledger.NodeSpec) {
	c.free.setNode(object.Name, object.Status.Allocatable)
	if len(spec.Cards) == 0 {
		c.usable.remove(object.Name)
	} else {
		c.usable.set(&Node{Object: object, Support: spec.Support, Closed: spec.Closed})
	}
}

// DeleteNode removes a node that was deleted, or shares no cards any more.
func (c *Cluster) DeleteNode(name string) {
	c.free.deleteNode(name)
	c.usable.remove(name)
}

// SetPod adds or updates a pod that hasn't ended.
func (c *Cluster) SetPod(pod *PodUse) {
	if former := c.free.setPod(pod); former != nil {
		defer c.usable.release(former.Constraints)
	}
	c.usable.retain(pod.Constraints)
}

// DeletePod removes a pod that was deleted or has ended.
func (c *Cluster) DeletePod(uid gpu.PodUID) {
	if last := c.free.deletePod(uid); last != nil {
		c.usable.release(last.Constraints)
	}
}

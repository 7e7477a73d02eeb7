package eligibility

import (
	"unique"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
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

// Names returns the names of the nodes that pods with the constraints can use, whatever they have free, in order; not nil. The caller must not
// change them. Equal sets of nodes mostly share one slice.
func (c *Cluster) Names(constraints unique.Handle[string]) []string {
	return c.usable.names(constraints)
}

// Among returns those of the nodes that pods with the constraints can use.
func (c *Cluster) Among(constraints unique.Handle[string], nodes []string) []string {
	return c.usable.among(constraints, nodes)
}

// Unmatched returns the number of nodes that Names must match with the constraints: those that have changed since the last call for such pods,
// or all. It is what the call costs, beside the size of the constraints. all is the number of all nodes.
func (c *Cluster) Unmatched(constraints unique.Handle[string]) (unmatched, all int) {
	return c.usable.unmatched(constraints)
}

// Shape implements ledger.Resources.
func (c *Cluster) Shape(uid gpu.PodUID) (placement.Shape, bool) { return c.free.shape(uid) }

// FreeBeside returns what the bound pods leave of the node beside its cards, which is never negative, and the revision of this state. Of what the
// node doesn't list, everything is free. ok is false if the node isn't known.
func (c *Cluster) FreeBeside(node string) (free placement.Beside, revision uint64, ok bool) {
	return c.free.beside(node)
}

// Fits implements ledger.Resources. A node that isn't known, and a pod that isn't, lacks nothing.
func (c *Cluster) Fits(q ledger.ResourceQuery) bool { return c.free.fit(&q) }

// Part implements ledger.Resources.
func (c *Cluster) Part(node string, pods []gpu.PodUID) float64 { return c.free.part(node, pods) }

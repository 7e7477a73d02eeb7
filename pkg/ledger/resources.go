package ledger

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Resources knows what nodes have free besides GPU memory (CPU, memory, pods, extended resources), and what pods ask for. It is called with the
// ledger's lock held, so it must not call the ledger.
type Resources interface {
	// Shape returns what the pod asks for of its node; false if the pod isn't known.
	Shape(uid gpu.PodUID) (placement.Shape, bool)
	// Requests returns a text that is equal for pods that ask for the same resources of their nodes; empty if the pod isn't known.
	Requests(uid gpu.PodUID) string
	// Fits reports whether pods fit a node.
	Fits(q ResourceQuery) bool
	// LargestPart returns the part of a node that the pods request, from 0 to 1: of the resource of which it is the largest.
	LargestPart(node string, pods []gpu.PodUID) float64
}

// ResourceQuery asks whether pods fit a node by its resources. Pods that are bound to the node count as using it, whether they are named or not.
type ResourceQuery struct {
	Node string
	// Pods are the pods, and Ahead are others that need a place on the node as well. Those that aren't pending count no more.
	Pods, Ahead []gpu.PodUID
	// Ending are pods that are bound to the node and count as gone.
	Ending []gpu.PodUID
	// Listed is true if the node must list what the pods request. kube-scheduler offers other nodes too, if another extender or a driver
	// provides the resource.
	Listed bool
}

// memoryOnly are Resources that nothing is known of: only GPU memory counts.
type memoryOnly struct{}

func (memoryOnly) Shape(gpu.PodUID) (placement.Shape, bool) { return placement.Shape{}, false }
func (memoryOnly) Requests(gpu.PodUID) string               { return "" }
func (memoryOnly) Fits(ResourceQuery) bool                  { return true }
func (memoryOnly) LargestPart(string, []gpu.PodUID) float64 { return 0 }

// hasReserved reports whether something is reserved on the node. n may be nil.
func (n *node) hasReserved() bool { return n != nil && (len(n.reserved) > 0 || n.assumed > 0) }

// HasReserved reports whether something is reserved on the node, so that pods may fit once it has more CPU or another resource free.
func (l *Ledger) HasReserved(name string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.nodes[name].hasReserved()
}

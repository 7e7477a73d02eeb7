package diagnosis

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Node is a node that shares its cards.
type Node struct {
	// Of Object, the allocatable GPU memory is used too.
	eligibility.Node
	// Unit is the unit of the cards' memory.
	Unit  gpu.Unit
	Cards []placement.Card
	// Requested is the sum of the requests of the node's pods, with those on failed or missing cards.
	Requested gpu.Memory
	// Terminating are the node's pods that are being deleted.
	Terminating []Terminating
	// Nominees are the pods that are nominated to the node and have no allocation yet, in descending order of priority.
	Nominees []ledger.Place
}

// Terminating is a pod that is being deleted and still holds its GPU memory.
type Terminating struct {
	gpu.Pod
	// Placement are the pod's cards; empty if they are unknown.
	Placement gpu.Placement
	// Since is when the deletion was requested, Due when the grace period ends. Both are zero if unknown.
	Since, Due time.Time
}

// Overdue reports whether the pod still exists well after its deletion deadline, see protocol.Overdue.
func (t *Terminating) Overdue(now time.Time) bool { return protocol.Overdue(t.Due, now) }

// leavingFor reports whether a pod of lower priority is about to end on the node.
func (n *Node) leavingFor(pod gpu.Pod, now time.Time) bool {
	return slices.ContainsFunc(n.Terminating, func(t Terminating) bool { return t.Priority < pod.Priority && !t.Overdue(now) })
}

// allocatable returns the sum of the node's memory that kube-scheduler counts; false if the node doesn't report it.
func (n *Node) allocatable() (gpu.Memory, bool) {
	quantity, known := n.Object.Status.Allocatable[protocol.ResourceMemory]
	return gpu.NewMemory(quantity.Value()), known
}

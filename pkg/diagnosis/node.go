package diagnosis

import (
	"math"
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

	// The fields below are computed once, because they are read for each request.
	totals placement.Totals
	// spare is what kube-scheduler counts as free on the node; the greatest amount if the node doesn't report its allocatable memory.
	spare gpu.Memory
	// after are the cards once the terminating pods have ended; nil if no pod is terminating.
	after []placement.Card
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

// compute sets the computed fields.
func (n *Node) compute() {
	n.totals, n.spare, n.after = placement.Sum(n.Cards), math.MaxInt64, nil
	if allocatable, known := n.Object.Status.Allocatable[protocol.ResourceMemory]; known {
		n.spare = gpu.NewMemory(allocatable.Value()).Sub(n.Requested)
	}
	if len(n.Terminating) > 0 {
		n.after = slices.Clone(n.Cards)
	}
	for i := range n.Terminating {
		placement.Release(n.after, n.Terminating[i].Placement)
	}
}

// leavingFor reports whether a pod of lower priority is about to end on the node.
func (n *Node) leavingFor(pod gpu.Pod, now time.Time) bool {
	return slices.ContainsFunc(n.Terminating, func(t Terminating) bool { return t.Priority < pod.Priority && !t.Overdue(now) })
}

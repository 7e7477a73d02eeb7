package preemption

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Amounts are quantities of resources. Which ones, in which order and unit, is the caller's to choose: those that the
// preemptor asks for.
type Amounts []int64

// Request is what the preemptor asks for.
type Request struct {
	Memory gpu.Memory
	// Others are all resources that the node is to have room for, GPU memory included: its sum is checked as well.
	Others Amounts
}

// Pod is one that may have to leave.
type Pod struct {
	UID      gpu.PodUID
	Priority int32
	// Leaving says that it is being deleted already: naming it costs nothing, and lets the preemptor wait for it.
	Leaving bool
	// Proposed says that kube-scheduler has named it. Others are to be of lower priority than the preemptor.
	Proposed bool
	// Fixed says that nobody can tell whether the preemptor could run beside it: it goes, being proposed.
	Fixed bool
	// Where is the GPU memory that surely comes free when it goes.
	Where gpu.Placement
	// Takes is what else comes free, in the order of Request.Others; nil for nothing.
	Takes Amounts
	// Budgets are the disruption budgets that guard it, as positions in Node.Budgets.
	Budgets []int
	// Uncounted says that its budgets aren't known, see Node.Violations.
	Uncounted bool
}

// Node is a node with the pods in question: those that kube-scheduler proposed, in its order, and those that hold GPU
// memory and are of lower priority than the preemptor. No pod stands there twice.
type Node struct {
	// Cards as the preemptor finds them, see ledger.Standing.
	Cards []placement.Card
	// Free is what the node has left of the resources in Request.Others, negative where it is overfull.
	Free Amounts
	Pods []Pod
	// Budgets tells of each disruption budget how many evictions it still allows.
	Budgets []int
	// Violations is how many of the proposed evictions break a budget, as kube-scheduler has counted.
	Violations int
}

// Victims are who must leave.
type Victims struct {
	// Pods has the highest priority first, as kube-scheduler reads it.
	Pods []gpu.PodUID
	// Violations is how many of their evictions break a disruption budget.
	Violations int
}

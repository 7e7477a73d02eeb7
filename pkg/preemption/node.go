package preemption

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Amounts are quantities of the resources that the preemptor requests. The caller chooses their order and units.
type Amounts []int64

// Request is the preemptor's request.
type Request struct {
	// Demand is what it needs of the cards.
	Demand gpu.Demand
	// Resources are all resources that must fit the node. They include the node's sums of GPU memory and cores.
	Resources Amounts
}

// Pod is a pod that can become a victim.
type Pod struct {
	UID      gpu.PodUID
	Priority int32
	// Terminating is true for a pod that is being deleted. As a victim it costs nothing; the preemptor awaits its end.
	Terminating bool
	// Proposed is true for a pod of kube-scheduler's proposal. Other pods must have a lower priority than the preemptor.
	Proposed bool
	// MustEvict is true for a proposed pod that may conflict with the preemptor in an unknown way. It is always a victim.
	MustEvict bool
	// Placement is what is certain to become free of the cards when the pod ends.
	Placement gpu.Placement
	// Requests are the resources that become free when the pod ends, in the order of Request.Resources; nil for none.
	Requests Amounts
	// Budgets are the disruption budgets that cover the pod, as positions in Node.Budgets.
	Budgets []int
	// BudgetsUnknown is true if the pod's disruption budgets are unknown, see Node.Violations.
	BudgetsUnknown bool
}

// Node is a node with the pods that can become victims: those of kube-scheduler's proposal, in its order, and those that
// hold GPU memory and have a lower priority than the preemptor. Each pod occurs once.
type Node struct {
	// Cards are the cards as the preemptor sees them, see ledger.Availability.
	Cards []placement.Card
	// Free are the node's free resources in the order of Request.Resources, negative for an overcommitted one.
	Free Amounts
	Pods []Pod
	// Budgets holds the number of evictions that each disruption budget still allows.
	Budgets []int
	// Violations is the number of the proposal's evictions that violate a disruption budget, as counted by kube-scheduler.
	Violations int
}

// Victims are the pods to evict.
type Victims struct {
	// Pods are ordered by descending priority, as kube-scheduler expects.
	Pods []gpu.PodUID
	// Violations is the number of these evictions that violate a disruption budget.
	Violations int
}

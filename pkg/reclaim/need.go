package reclaim

import (
	"fmt"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Need is the room that tenants below their share need, with the pods that may be evicted for it.
type Need struct {
	// Attempt is the number of the attempt to make this room.
	Attempt uint64
	// Units are served in this order. Those for which no room can be made are skipped.
	Units []Unit
	// Victims are the candidates, the newest first.
	Victims []Victim
	// Tenants are those of the units and of the candidates, by name.
	Tenants map[string]Standing
	// Regions are the regions of the nodes, and Classes those that the pods of each class can use; nil if all pods can use the same nodes.
	Regions map[string]int
	Classes [][]int
}

// Unit is what gets room as a whole or not at all: a pod, or the members of a group that must be bound together.
type Unit struct {
	Tenant string
	// Pods are ordered: the largest first.
	Pods []Pod
}

// Pod is a pod that gets room.
type Pod struct {
	gpu.Pod
	// Nodes are the nodes on which it can run.
	Nodes []string
}

// Victim is what is evicted at once: a pod, or all bound members of a group.
type Victim struct {
	Tenant string
	// Started is when the pod was bound, or the first member of the group.
	Started time.Time
	Pods    []gpu.Pod
	// Spots are those of the pods; nil if the victim can't move.
	Spots []Spot
}

// Memory returns what the victim's pods have.
func (v Victim) Memory() (sum gpu.Memory) {
	for _, p := range v.Pods {
		sum = sum.Add(p.Request)
	}
	return sum
}

// Standing is what a tenant has and deserves.
type Standing struct {
	Share, Allocated gpu.Memory
	// Excess is how much of what its pods run with can be evicted, so that the others still have its share. Pods that are being
	// deleted count as gone.
	Excess gpu.Memory
	// Losses, Gains and Moves compare what the tenant has with what fairshare.Pools.Assign gives it. Losses is how much less it is to
	// have, by region and class, Gains how much more, by region, with what its waiting pods get. Moves is the smaller of the two sums.
	Losses map[Spot]gpu.Memory
	Gains  map[int]gpu.Memory
	Moves  gpu.Memory
}

// String returns such as "8 of its share of 16".
func (s Standing) String() string { return fmt.Sprintf("%v of its share of %v", s.Allocated, s.Share) }

// Cluster is the state in which the decision is made.
type Cluster struct {
	// Cards are the cards of the nodes as the pods of the need see them, with the pods gone that are being deleted.
	Cards map[string][]placement.Card
	// Leaving are the pods of each node that are being deleted.
	Leaving map[string][]gpu.PodUID
	// Places are those of the candidates' pods. A candidate is no victim if one of its pods has no place here.
	Places map[gpu.PodUID]Place
	// Capacity counts everything else; nil if nothing else counts.
	Capacity Capacity
	// Budgets are the disruption budgets of the candidates' pods, as positions in Allowed, which holds how many evictions each one
	// allows.
	Budgets map[gpu.PodUID][]int
	Allowed []int
}

// Place is where a pod is, or is to be.
type Place struct {
	Node string
	On   gpu.Placement
}

// Capacity counts what nodes have besides GPU memory.
type Capacity interface {
	// Take reports whether the pod fits the node, and if so counts it there. Return undoes that.
	Take(node string, uid gpu.PodUID) bool
	Return(node string, uid gpu.PodUID)
	// Evict removes a bound pod from the count of its node. Restore undoes that, and reports whether there is still room for it.
	Evict(node string, uid gpu.PodUID)
	Restore(node string, uid gpu.PodUID) bool
}

// Plan is the decision.
type Plan struct {
	// Victims are evicted, the newest first.
	Victims []Eviction
	// Served are the units that get room.
	Served []Served
	// Beyond is how much more memory the victims have than was missing on the cards.
	Beyond gpu.Memory
	// Tenants are those of the need.
	Tenants map[string]Standing
}

// Eviction is a victim with the unit for which it was chosen.
type Eviction struct {
	Victim
	For Unit
	// Moves is true if the victim's tenant may have less than its share without the victim, until it gets other room.
	Moves bool
}

// Served is a unit that gets room.
type Served struct {
	Unit
	// Places are those of its pods once the victims are gone.
	Places []Place
	// Awaited are the victims' pods on these nodes, and the pods there that are being deleted.
	Awaited []gpu.PodUID
}

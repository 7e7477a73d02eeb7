package reclaim

import (
	"fmt"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Need lists the items of tenants below their share that need room, and the pods that may be evicted for them.
type Need struct {
	// Items are the items that need room. They are served in this order; an item for which no room can be made is skipped.
	Items []Item
	// Victims are the candidates, the newest first. A pod can belong to several of them, of which at most one is evicted.
	Victims []Victim
	// Tenants are those of the items and of the candidates, by name.
	Tenants map[string]Tenant
}

// Item is a pod, or the members of a group that must be bound together. It gets room as a whole or not at all.
type Item struct {
	Tenant string
	// ID is the ID of the item of the queue.
	ID string
	// Pods are ordered by request, the largest first.
	Pods []Pod
}

// Pod is a pod that gets room.
type Pod struct {
	gpu.Pod
	// Nodes are the nodes on which it can run, by name.
	Nodes []string
}

// Victim is a pod, or all bound members of a group. It is evicted as a whole.
type Victim struct {
	Tenant string
	// Started is when the pod, or the first member of the group, was bound.
	Started time.Time
	Pods    []gpu.Pod
}

// Memory returns the memory of the victim's pods.
func (v Victim) Memory() (sum gpu.Memory) {
	for _, p := range v.Pods {
		sum = sum.Add(p.Request)
	}
	return sum
}

// Tenant is the state of a tenant: its share, the memory that it has, and what it can lose.
type Tenant struct {
	Share, Allocated gpu.Memory
	// Excess is how much memory of its bound pods can be evicted so that the rest is still its share. Pods that are being deleted count as
	// gone.
	Excess gpu.Memory
}

// String returns such as "8 of its share of 16".
func (t Tenant) String() string { return fmt.Sprintf("%v of its share of %v", t.Allocated, t.Share) }

// Cluster is the state in which the decision is made.
type Cluster struct {
	// Cards are the cards of the nodes as the items' pods see them. Pods that are being deleted count as gone.
	Cards map[string][]placement.Card
	// Leaving are the pods of each node that are being deleted.
	Leaving map[string][]gpu.PodUID
	// Places are the places of the candidates' pods. A candidate can't be a victim if one of its pods has no place here.
	Places map[gpu.PodUID]Place
	// FitsResources reports whether pods have CPU and all other resources on a node together once the pods in gone have ended there.
	FitsResources func(node string, pods []gpu.Pod, gone []gpu.PodUID) bool
	// Budgets are the disruption budgets of the candidates' pods, as positions in Allowed. Allowed holds how many evictions each budget
	// allows.
	Budgets map[gpu.PodUID][]int
	Allowed []int
}

// Place is a node and a placement there, for one pod.
type Place struct {
	Node string
	On   gpu.Placement
}

// Plan is the decision.
type Plan struct {
	// Victims are evicted, the newest first.
	Victims []Eviction
	// Served are the items that get room.
	Served []Served
	// Tenants are those of the need.
	Tenants map[string]Tenant
}

// Eviction is a victim with the item for which it was chosen.
type Eviction struct {
	Victim
	For Item
}

// Served is an item that gets room.
type Served struct {
	Item
	// Places are the places of its pods. They are free once the victims have ended.
	Places []Place
	// Awaited are the pods on these nodes that must end: pods of the victims, and pods that are being deleted.
	Awaited []gpu.PodUID
}

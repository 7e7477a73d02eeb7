package ledger

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// node is the state of one node, guarded by the ledger's lock.
type node struct {
	// sharesCards is true if the node shares its cards, or should. Otherwise it has allocations only.
	sharesCards bool
	// costs are what the outlook says of the node; nil if they aren't known, since the node or the outlook has changed.
	costs atomic.Pointer[placement.Costs]
	// tentative are the tentative placements that name this node, see AddTentative.
	tentative []*tentativePlacement
	// reserved are the places of reservations on this node, see reservedPlace.compare.
	reserved []reservedPlace
	// cards are the cards of spec with what the allocations use, which recount sets.
	cards []placement.Card
	// spec is what the Node object determines, with the cards by index; zero if the node isn't known.
	spec NodeSpec
	// freeResources is what is free beside the cards, allResources what the node has of it, and excluded has the kinds of the outlook that can't use the node.
	freeResources, allResources placement.NodeResources
	excluded                    uint64

	name        string
	allocations map[gpu.PodUID]*Allocation
	// assumed is the number of assumed allocations, and leaving that of pods that are being deleted. recount sets both.
	assumed, leaving int
	// revision is the ledger's revision at the last change of this node.
	revision uint64
}

// setSpec sets what the Node object determines. The cards count as unused until recount.
func (n *node) setSpec(spec NodeSpec) {
	spec.Cards = slices.SortedFunc(slices.Values(spec.Cards), func(a, b gpu.Card) int { return a.Index - b.Index })
	n.sharesCards, n.spec, n.cards = true, spec, spec.empty()
}

// clearSpec undoes setSpec.
func (n *node) clearSpec() { n.sharesCards, n.spec, n.cards = false, NodeSpec{}, nil }

// empty returns the cards without allocations.
func (s *NodeSpec) empty() []placement.Card {
	cards := make([]placement.Card, len(s.Cards))
	for i, c := range s.Cards {
		cards[i] = placement.NewCard(c, 0)
	}
	return cards
}

// memory returns the memory of all cards of the node.
func (n *node) memory() gpu.Memory { return placement.Sum(n.cards).Memory }

// unit returns the node's unit, or a guess from the cards' sizes if the node doesn't report one.
func (n *node) unit() gpu.Unit { return gpu.UnitOf(n.spec.Unit, n.spec.Cards) }

// shareable returns Fits if the node shares its cards, else the reason why not. n may be nil.
func (n *node) shareable() reasons.Reason {
	switch {
	case n == nil || len(n.cards) == 0 && !n.spec.WholeCards:
		return reasons.NotShared
	case n.spec.WholeCards:
		return reasons.WholeCards
	}
	return reasons.Fits
}

// accepts returns Fits if pods with this demand can be placed on the node at all, else the reason why not. n may be nil.
func (n *node) accepts(demand *gpu.Demand) reasons.Reason {
	if reason := n.shareable(); reason != reasons.Fits {
		return reason
	}
	return n.spec.Accepts(demand)
}

// recount computes the used amounts of each card from the allocations. A full recount is cheap for the number of pods on a
// node, and unlike incremental changes it can't accumulate errors.
//
// Allocations with a known card are counted first. A presumed allocation keeps its placement as long as there is room, because the node
// may have placed the pod there. If there is none, it is placed again.
func (n *node) recount() {
	for i := range n.cards {
		n.cards[i] = n.cards[i].Empty()
	}
	n.assumed, n.leaving = 0, 0
	var presumed []*Allocation
	for _, a := range n.allocations {
		if a.State == Assumed {
			n.assumed++
		}
		if a.Leaving {
			n.leaving++
		}
		if a.Presumed {
			presumed = append(presumed, a)
			continue
		}
		placement.Use(n.cards, a.Placement)
	}
	slices.SortFunc(presumed, func(a, b *Allocation) int { return cmp.Compare(a.UID, b.UID) })
	var moving []*Allocation
	for _, a := range presumed {
		if len(a.Placement) > 0 && hasRoom(n.cards, a.Placement) {
			placement.Use(n.cards, a.Placement)
		} else {
			moving = append(moving, a)
		}
	}
	for _, a := range moving {
		a.Placement, _ = placement.Place(placement.Expected, n.cards, n.presumed(a.Pod))
		placement.Use(n.cards, a.Placement)
	}
}

// presumed returns the demand that the node serves for a pod whose annotations name no card. A node that doesn't support several cards gives
// the pod one card, an old device plugin counts no cores, and without adapters none can be near.
func (n *node) presumed(pod gpu.Pod) gpu.Demand {
	if n.spec.SeveralCards != reasons.Fits {
		pod.Cards = 1
	}
	if n.spec.Cores != reasons.Fits {
		pod.Cores = 0
	}
	if n.spec.RDMA != reasons.Fits {
		pod.RDMA = gpu.RDMANone
	}
	return pod.Demand()
}

// requests returns the sum of the allocations' requests, and the allocations of pods that are being deleted, in no order.
func (n *node) requests() (sum gpu.Memory, leaving []Allocation) {
	for _, a := range n.allocations {
		sum = sum.Add(a.Request)
		if a.Leaving {
			leaving = append(leaving, a.copy())
		}
	}
	return sum, leaving
}

// hasRoom reports whether each card of the placement exists and has enough free. It ignores health, because a running
// pod stays on its card when the card becomes unhealthy.
func hasRoom(cards []placement.Card, where gpu.Placement) bool {
	return !slices.ContainsFunc(where, func(share gpu.Share) bool {
		i, ok := placement.Position(cards, share.Card)
		return !ok || !cards[i].Has(share)
	})
}

// usesLessThan reports whether the allocations use less of a card than before, of its memory, its cores or its containers.
func (n *node) usesLessThan(before []placement.Card) bool {
	return slices.ContainsFunc(n.cards, func(c placement.Card) bool {
		i, ok := placement.Position(before, c.Index)
		return ok && (c.Used < before[i].Used || c.UsedCores < before[i].UsedCores || c.Containers < before[i].Containers)
	})
}

func (n *node) copy() Node {
	out := Node{Name: n.name, Gone: !n.sharesCards, NodeSpec: n.spec, Allocations: n.copyAllocations()}
	out.Cards = slices.Clone(out.Cards)
	for _, c := range n.cards {
		out.Used, out.UsedCores, out.Containers = append(out.Used, c.Used), append(out.UsedCores, c.UsedCores), append(out.Containers, c.Containers)
	}
	slices.SortFunc(out.Allocations, compareAllocations)
	return out
}

// compareAllocations orders allocations by namespace and name.
func compareAllocations(a, b Allocation) int {
	return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
}

// copyAllocations returns the allocations in no order.
func (n *node) copyAllocations() []Allocation {
	out := make([]Allocation, 0, len(n.allocations))
	for _, a := range n.allocations {
		out = append(out, a.copy())
	}
	return out
}

func (a *Allocation) copy() Allocation {
	out := *a
	out.Placement = slices.Clone(a.Placement)
	return out
}

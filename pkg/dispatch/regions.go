package dispatch

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
)

const (
	// maxClasses limits the constraints that get their own class, those with the most memory first. Pods with other constraints count as if
	// they could use all nodes.
	maxClasses = 32
	// maxRegions limits the regions. Constraints that would need more regions get no class either.
	maxRegions = 64
)

// regions divide the nodes into sets: the nodes of one region can be used by the same pods. A regions value is never changed.
type regions struct {
	fairshare.Pools
	// of is the region of each node that shares its cards.
	of map[string]int
	// classes holds the class of constraints, as a position in Pools.Classes. Constraints without a class count as allNodes.
	classes map[unique.Handle[string]]int
}

// allNodes is the position in Pools.Classes of the pods that can use all nodes.
const allNodes = 0

// newRegions computes the regions for pods with these constraints, the most important first. usable returns the nodes that such pods can use.
func newRegions(constraints []unique.Handle[string], usable func(unique.Handle[string]) []string, memory map[string]gpu.Memory) *regions {
	r := &regions{of: make(map[string]int, len(memory)), classes: map[unique.Handle[string]]int{}}
	// A node's bits are the classes of the pods that can use it. Nodes with the same bits are one region.
	bits := make(map[string]uint64, len(memory))
	for node := range memory {
		bits[node] = 1 << allNodes
	}
	classes := 1
	for _, c := range constraints[:min(len(constraints), maxClasses)] {
		next := maps.Clone(bits)
		for _, node := range usable(c) {
			if _, shares := next[node]; shares {
				next[node] |= 1 << classes
			}
		}
		if len(distinct(next)) <= maxRegions {
			bits, r.classes[c] = next, classes
			classes++
		}
	}
	sorted := distinct(bits)
	r.Sizes, r.Classes = make([]gpu.Memory, len(sorted)), make([][]int, classes)
	for region, of := range sorted {
		for class := range r.Classes {
			if of&(1<<class) != 0 {
				r.Classes[class] = append(r.Classes[class], region)
			}
		}
	}
	for node, of := range bits {
		region, _ := slices.BinarySearch(sorted, of)
		r.of[node], r.Sizes[region] = region, r.Sizes[region].Add(memory[node])
	}
	return r
}

// distinct returns the different values of the map, in order.
func distinct(bits map[string]uint64) []uint64 {
	values := map[uint64]struct{}{}
	for _, of := range bits {
		values[of] = struct{}{}
	}
	return slices.Sorted(maps.Keys(values))
}

// canUse reports whether pods of the class can use the node.
func (r *regions) canUse(class int, node string) bool {
	region, shares := r.of[node]
	return shares && slices.Contains(r.Classes[class], region)
}

// setShares computes the shares of the tenants. The pods' constraints count: the share of a tenant whose pods can use few nodes is at most the
// memory of these nodes, and the others divide the rest. It must be called without the Manager's lock: it takes long in a large cluster.
func (m *Manager) setShares(s *standings) {
	amounts := map[unique.Handle[string]]gpu.Memory{}
	for _, p := range s.allocated {
		amounts[p.Constraints] = amounts[p.Constraints].Add(p.counted)
	}
	for of, amount := range s.demanded {
		amounts[of.constraints] = amounts[of.constraints].Add(amount)
	}
	delete(amounts, unique.Handle[string]{}) // Such pods can use all nodes.
	constraints := slices.SortedFunc(maps.Keys(amounts), func(a, b unique.Handle[string]) int {
		return cmp.Or(cmp.Compare(amounts[b], amounts[a]), strings.Compare(a.Value(), b.Value()))
	})
	pools, demands := s.demands(newRegions(constraints, m.Nodes.UsableNodes, m.Ledger.NodeMemory()))
	sharing := make([]fairshare.Tenant, len(s.tenants))
	for i, t := range s.tenants {
		sharing[i] = fairshare.Tenant{Terms: t.Terms, Name: t.Name}
		for _, amount := range demands[i] {
			sharing[i].Demand = sharing[i].Demand.Add(amount)
		}
	}
	for i, share := range pools.Shares(sharing, demands) {
		s.tenants[i].Share = share
	}
}

// demands returns the regions as pools, and the parts of each tenant's demand by class. Memory on nodes that its pods couldn't use now, such as
// cordoned ones, has a pool and a class of its own.
func (s *standings) demands(r *regions) (pools fairshare.Pools, demands [][]gpu.Memory) {
	closed, onClosed := len(r.Classes), gpu.Memory(0)
	position := make(map[string]int, len(s.tenants))
	demands = make([][]gpu.Memory, len(s.tenants))
	for i, t := range s.tenants {
		position[t.Name], demands[i] = i, make([]gpu.Memory, closed+1)
	}
	for _, p := range s.allocated {
		if p.counted == 0 {
			continue
		}
		class := r.classes[p.Constraints]
		if p.Node != "" && !r.canUse(class, p.Node) {
			class, onClosed = closed, onClosed.Add(p.counted)
		}
		own := demands[position[p.countedFor]]
		own[class] = own[class].Add(p.counted)
	}
	for of, amount := range s.demanded {
		class := r.classes[of.constraints]
		demands[of.tenant][class] = demands[of.tenant][class].Add(amount) // A user can request any amount.
	}
	pools.Sizes = append(slices.Clone(r.Sizes), onClosed)
	pools.Classes = append(slices.Clone(r.Classes), []int{len(r.Sizes)})
	return pools, demands
}

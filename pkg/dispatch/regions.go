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
	// maxTried limits the constraints for which eligible nodes are computed, in KiB.
	maxTried = 2 * maxClasses
)

// regions divide the nodes into sets: the nodes of one region can be used by the same pods. A regions value is never changed.
type regions struct {
	fairshare.Pools
	// of is the region of each node that shares its cards.
	of map[string]int
	// changes is Manager.nodeChanges as it was before they were computed.
	changes uint64
	// classes holds the class, as a position in Pools.Classes, of each of the constraints that were known when the regions were computed.
	classes map[unique.Handle[string]]int
}

// allNodes is the position in Pools.Classes of the pods that can use all nodes.
const allNodes = 0

// newRegions computes the regions for pods with these constraints, the most important first.
func newRegions(constraints []unique.Handle[string], eligible func(unique.Handle[string]) map[string]struct{}, memory map[string]gpu.Memory) *regions {
	r := &regions{of: make(map[string]int, len(memory)), classes: map[unique.Handle[string]]int{}}
	for node := range memory {
		r.of[node] = 0
	}
	n, tried := 1, 0
	var sets []map[string]struct{}
	for _, c := range constraints {
		r.classes[c] = allNodes
		if c == (unique.Handle[string]{}) || len(sets) == maxClasses || tried >= maxTried {
			continue
		}
		tried += sizeOf(c)
		set := eligible(c)
		if of, parts := split(r.of, set); parts <= maxRegions {
			r.of, n = of, parts
			sets = append(sets, set)
			r.classes[c] = len(sets)
		}
	}
	r.Sizes, r.Classes = make([]gpu.Memory, n), make([][]int, 1+len(sets))
	for region := range n {
		r.Classes[allNodes] = append(r.Classes[allNodes], region)
	}
	seen := make([]bool, n)
	for node, region := range r.of {
		r.Sizes[region] = r.Sizes[region].Add(memory[node])
		if seen[region] {
			continue
		}
		seen[region] = true
		for i, set := range sets {
			if _, inside := set[node]; inside {
				r.Classes[1+i] = append(r.Classes[1+i], region)
			}
		}
	}
	for _, class := range r.Classes {
		slices.Sort(class)
	}
	return r
}

// split divides the regions of the nodes into those inside the set and those outside of it.
func split(of map[string]int, set map[string]struct{}) (map[string]int, int) {
	type part struct {
		region int
		inside bool
	}
	parts, out := map[part]int{}, make(map[string]int, len(of))
	for _, node := range slices.Sorted(maps.Keys(of)) {
		_, inside := set[node]
		p := part{of[node], inside}
		if _, known := parts[p]; !known {
			parts[p] = len(parts)
		}
		out[node] = parts[p]
	}
	return out, len(parts)
}

// usable reports whether pods of the class can use the region.
func (r *regions) usable(class, region int) bool {
	_, found := slices.BinarySearch(r.Classes[class], region)
	return found
}

// installRegions computes the regions for pods with these amounts of memory by constraints, and makes them those of the Manager.
func (m *Manager) installRegions(amounts map[unique.Handle[string]]gpu.Memory) *regions {
	constraints := slices.SortedFunc(maps.Keys(amounts), func(a, b unique.Handle[string]) int {
		return cmp.Or(cmp.Compare(amounts[b], amounts[a]), strings.Compare(text(a), text(b)))
	})
	changes := m.nodeChanges.Load() // Before the nodes are read: regions that miss a later change are outdated.
	r := newRegions(constraints, m.eligibleSet, m.Ledger.NodeMemory())
	r.changes = changes
	m.regions.Store(r)
	return r
}

// eligibleSet returns the nodes that pods with the constraints can use.
func (m *Manager) eligibleSet(constraints unique.Handle[string]) map[string]struct{} {
	names := m.Nodes.Names(constraints)
	set := make(map[string]struct{}, len(names))
	for _, name := range names {
		set[name] = struct{}{}
	}
	return set
}

// text returns the value of a handle, of which the zero value has none.
func text(h unique.Handle[string]) string {
	if h == (unique.Handle[string]{}) {
		return ""
	}
	return h.Value()
}

// setShares computes the shares of the tenants. The pods' constraints count: the share of a tenant whose pods can use few nodes is at most the
// memory of these nodes, and the others divide the rest. It must be called without the Manager's lock: it takes long in a large cluster.
func (m *Manager) setShares(s *standings) {
	s.regions = m.regions.Load()
	pools, demands, ok := s.demands(m.nodeChanges.Load())
	if !ok { // There are new constraints, or nodes have changed.
		amounts := map[unique.Handle[string]]gpu.Memory{}
		for _, p := range s.allocated {
			if p.counted > 0 {
				amounts[p.Constraints] = amounts[p.Constraints].Add(p.counted)
			}
		}
		for of, amount := range s.demanded {
			amounts[of.constraints] = amounts[of.constraints].Add(amount)
		}
		s.regions = m.installRegions(amounts)
		pools, demands, _ = s.demands(s.regions.changes)
	}
	for i, share := range pools.Shares(s.sharing, demands) {
		s.tenants[i].Share = share
	}
}

// demands returns the regions as pools, and the parts of each tenant's demand by class. Memory on nodes that its pods couldn't use now, such as
// cordoned ones, has a pool and a class of its own. ok is false if there are no regions after that many changes of nodes yet, or a pod has
// constraints that they don't know.
func (s *standings) demands(changes uint64) (pools fairshare.Pools, demands [][]gpu.Memory, ok bool) {
	r := s.regions
	if r == nil || r.changes != changes {
		return pools, nil, false
	}
	closed := len(r.Classes)
	position := make(map[string]int, len(s.sharing))
	demands = make([][]gpu.Memory, len(s.sharing))
	for i, c := range s.sharing {
		position[c.Name], demands[i] = i, make([]gpu.Memory, closed+1)
	}
	onClosed, ok := gpu.Memory(0), true
	for _, p := range s.allocated {
		if p.counted == 0 {
			continue
		}
		class, known := r.classes[p.Constraints]
		ok = ok && known
		if region, shared := r.of[p.Node]; p.Node != "" && (!shared || !r.usable(class, region)) {
			class, onClosed = closed, onClosed.Add(p.counted)
		}
		own := demands[position[p.countedFor]]
		own[class] = own[class].Add(p.counted)
	}
	for of, amount := range s.demanded {
		class, known := r.classes[of.constraints]
		ok = ok && known
		demands[of.tenant][class] = demands[of.tenant][class].Add(amount) // A user can request any amount.
	}
	pools.Sizes = append(slices.Clone(r.Sizes), onClosed)
	pools.Classes = append(slices.Clone(r.Classes), []int{len(r.Sizes)})
	return pools, demands, ok
}

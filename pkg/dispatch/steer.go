package dispatch

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// steer sets the preferred nodes. Pods that can use many regions avoid the regions for which pods with fewer usable regions wait: a class
// avoids the regions of every waiting class that can use only a part of its own regions. Its pods are tried on their preferred nodes
// first, and then on all their nodes.
func (m *Manager) steer(s *standings) {
	r := m.regions
	if r == nil {
		return
	}
	waiting := map[int]bool{}
	for of := range s.demanded {
		waiting[r.classes[of.constraints]] = true
	}
	for constraints, nodes := range m.eligible {
		class, known := r.classes[constraints]
		if !known || class == allNodes {
			continue
		}
		var avoided []int
		for other := range waiting {
			if r.within(other, class) {
				avoided = append(avoided, r.Classes[other]...)
			}
		}
		slices.Sort(avoided)
		if avoided = slices.Compact(avoided); slices.Equal(avoided, nodes.avoided) {
			continue
		}
		nodes.avoided, nodes.preferred = avoided, nil
		if len(avoided) == 0 || len(avoided) == len(r.Classes[class]) {
			continue
		}
		nodes.preferred = r.outside(avoided, nodes.names)
	}
}

// outside returns those of the nodes that are in other regions.
func (r *regions) outside(avoided []int, nodes []string) []string {
	out := []string{}
	for _, name := range nodes {
		if region, known := r.of[name]; known && !slices.Contains(avoided, region) {
			out = append(out, name)
		}
	}
	return out
}

// within reports whether the class can use fewer regions than the other one, and no others.
func (r *regions) within(class, other int) bool {
	return len(r.Classes[class]) < len(r.Classes[other]) && !slices.ContainsFunc(r.Classes[class], func(region int) bool { return !r.usable(other, region) })
}

// preferred returns the requests of a unit restricted to preferred nodes; nil if that makes no difference.
func (m *Manager) preferred(u *unit, requests []ledger.Request) (out []ledger.Request) {
	for i, p := range u.pods {
		nodes := m.nodesFor(p)
		if nodes.preferred == nil {
			continue
		}
		if out == nil {
			out = slices.Clone(requests)
		}
		if len(requests[i].Nodes) == len(nodes.names) { // Pods that are alike share the slice.
			out[i].Nodes = nodes.preferred
		} else {
			out[i].Nodes = m.regions.outside(nodes.avoided, requests[i].Nodes)
		}
	}
	return out
}

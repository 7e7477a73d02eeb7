package dispatch

import (
	"slices"
	"unique"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// steer returns the preferred nodes, by Pod.Constraints. Pods that can use many regions avoid the regions for which pods with fewer usable
// regions wait: a class avoids the regions of every waiting class that can use only a part of its own regions. Its pods are tried on their
// preferred nodes first, and then on all their nodes. It must be called without the Manager's lock: it takes long in a large cluster.
func (m *Manager) steer(s *standings) map[unique.Handle[string]]preference {
	m.mu.Lock()
	former := m.preferences
	if m.regions != s.regions {
		former = nil
	}
	m.mu.Unlock()
	r, out := s.regions, map[unique.Handle[string]]preference{}
	waiting := map[int]bool{}
	for of := range s.demanded {
		waiting[r.classes[of.constraints]] = true
	}
	for constraints, class := range r.classes {
		if class == allNodes {
			continue
		}
		var avoided []int
		for other := range waiting {
			if r.within(other, class) {
				avoided = append(avoided, r.Classes[other]...)
			}
		}
		slices.Sort(avoided)
		avoided = slices.Compact(avoided)
		if len(avoided) == 0 || len(avoided) == len(r.Classes[class]) {
			continue
		}
		preferred := former[constraints]
		if !slices.Equal(avoided, preferred.avoided) {
			all := m.Nodes.Names(constraints)
			preferred = preference{avoided, r.outside(avoided, all), len(all)}
		}
		out[constraints] = preferred
	}
	return out
}

// preference is on which of the nodes that they can use pods are tried first.
type preference struct {
	// avoided are the regions that they avoid, and nodes the others.
	avoided []int
	nodes   []string
	// of is the number of nodes that they can use.
	of int
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
		preference, prefers := m.preferences[p.Constraints]
		if !prefers {
			continue
		}
		if out == nil {
			out = slices.Clone(requests)
		}
		if len(requests[i].Nodes) == preference.of { // Pods that are alike share the slice.
			out[i].Nodes = preference.nodes
		} else {
			out[i].Nodes = m.regions.outside(preference.avoided, requests[i].Nodes)
		}
	}
	return out
}

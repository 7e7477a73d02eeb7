package dispatch

import (
	"maps"
	"slices"
	"sync"
	"unique"
)

// maxFreed is the largest number of freed nodes that are listed. If there are more, pods are tried on all nodes.
const maxFreed = 64

// freedNodes are nodes on which resources were freed. mu guards names. No other lock is taken while it is held.
type freedNodes struct {
	mu    sync.Mutex
	names map[string]struct{}
}

func (f *freedNodes) add(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.names == nil {
		f.names = map[string]struct{}{}
	}
	if len(f.names) <= maxFreed {
		f.names[name] = struct{}{}
	}
}

// take removes and returns the nodes. all is true if there are too many to list.
func (f *freedNodes) take() (names map[string]struct{}, all bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	names, f.names = f.names, nil
	return names, len(names) > maxFreed
}

// eligibleFor returns the nodes that pods with the constraints can use.
func (m *Manager) eligibleFor(constraints unique.Handle[string]) []string {
	return m.Nodes.Names(constraints)
}

// mayUse reports whether the pod can use the node.
func (m *Manager) mayUse(p *pod, node string) bool {
	return len(m.Nodes.Among(p.Constraints, []string{node})) > 0
}

const (
	// fewUnmatched is how many nodes constraints are matched with during a round. Those that must be matched with more are matched after it, without the
	// Manager's lock: with all nodes, that takes milliseconds in a large cluster.
	fewUnmatched = 8
	// maxMatched limits the nodes with which match matches constraints, times the size of the constraints.
	maxMatched = 40_000
)

// awaitsMatch reports whether constraints of the unit's pods must be matched first, and notes these.
func (m *Manager) awaitsMatch(u *unit) (awaits bool) {
	for _, p := range u.pods {
		if m.Nodes.Unmatched(p.Constraints) > fewUnmatched {
			m.unmatched[u.item.Tenant], awaits = append(m.unmatched[u.item.Tenant], p.Constraints), true
		}
		if !u.mixed {
			break
		}
	}
	return awaits
}

// match matches constraints of units that were passed over, alternately of each tenant: tenants don't wait for thousands of another one's constraints.
func (m *Manager) match() {
	tenants := slices.Sorted(maps.Keys(m.unmatched))
	next, _ := slices.BinarySearch(tenants, m.matchedFor+"\x00")
	tenants = slices.Concat(tenants[next:], tenants[:next])
	for i, matched, more := 0, 0, true; more; i++ {
		more = false
		for _, tenant := range tenants {
			if i >= len(m.unmatched[tenant]) || matched > maxMatched {
				continue
			}
			constraints := m.unmatched[tenant][i]
			matched += m.Nodes.Unmatched(constraints) * sizeOf(constraints)
			m.Nodes.Names(constraints)
			m.matchedFor, more = tenant, true
		}
	}
}

// sizeOf returns the size of the constraints in KiB, rounded up: what it costs to find the nodes that satisfy them grows with it.
func sizeOf(constraints unique.Handle[string]) int { return 1 + len(text(constraints))/1024 }

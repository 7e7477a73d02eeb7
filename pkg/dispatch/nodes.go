package dispatch

import (
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

// spendFor adds to the effort what it costs to find the nodes that pods with the constraints can use.
func (m *Manager) spendFor(constraints unique.Handle[string]) {
	if unmatched, all := m.Nodes.Unmatched(constraints); unmatched > 0 {
		effort := max(1, constraintsEffort*unmatched/all) * sizeOf(constraints)
		m.effort += min(effort, maxTenantEffort) // More would end the round for other tenants.
	}
}

// mayUse reports whether the pod can use the node.
func (m *Manager) mayUse(p *pod, node string) bool {
	return len(m.Nodes.Among(p.Constraints, []string{node})) > 0
}

// sizeOf returns the size of the constraints in KiB, rounded up: what it costs to find the nodes that satisfy them grows with it.
func sizeOf(constraints unique.Handle[string]) int { return 1 + len(text(constraints))/1024 }

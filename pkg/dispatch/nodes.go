package dispatch

import (
	"sync"
	"unique"
)

const (
	// maxFreed is the largest number of freed nodes that are listed. If there are more, pods are tried on all nodes.
	maxFreed = 64
	// maxConstraints is the number of constraints for which eligible nodes are remembered.
	maxConstraints = 256
)

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

// eligibleNodes are the nodes that some pods can use regardless of free resources. Those pods share the slices, which lets the
// ledger rank the nodes once.
type eligibleNodes struct {
	names []string
	set   map[string]struct{}
	// freed are the nodes on which resources were freed since the former round.
	freed []string
	// preferred are those outside of the avoided regions; nil if it makes no difference.
	preferred []string
	avoided   []int
}

func newEligibleNodes(names []string) *eligibleNodes {
	e := &eligibleNodes{names: names, set: make(map[string]struct{}, len(names))}
	for _, name := range names {
		e.set[name] = struct{}{}
	}
	return e
}

// setFreed sets the nodes on which resources were freed.
func (e *eligibleNodes) setFreed(names []string) {
	e.freed = nil
	for _, name := range names {
		if _, eligible := e.set[name]; eligible {
			e.freed = append(e.freed, name)
		}
	}
}

// nodesFor returns the eligible nodes of the pod.
func (m *Manager) nodesFor(p *pod) *eligibleNodes { return m.eligibleFor(p.Constraints) }

// eligibleFor returns the eligible nodes of pods with the constraints.
func (m *Manager) eligibleFor(constraints unique.Handle[string]) *eligibleNodes {
	nodes, known := m.eligible[constraints]
	if !known {
		m.effort += min(constraintsEffort*sizeOf(constraints), ownEffort) // More would end the round for other tenants.
		nodes = newEligibleNodes(m.EligibleNodes(constraints))
		m.eligible[constraints] = nodes
	}
	return nodes
}

// sizeOf returns the size of the constraints in KiB, rounded up: what it costs to find the nodes that satisfy them grows with it.
func sizeOf(constraints unique.Handle[string]) int { return 1 + len(text(constraints))/1024 }

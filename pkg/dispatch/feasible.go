package dispatch

import "time"

const (
	// feasibleFor is how long results are kept. A change of a node drops them earlier. They also depend on pods without GPU memory, whose
	// changes drop nothing.
	feasibleFor = time.Minute
	// nodesPerEffort is how many checks of a node's other resources cost as much effort as one attempt to reserve places, see maxEffort.
	nodesPerEffort = 32
)

// everFits reports whether the unit would fit the nodes that its pods can use if no pod had GPU memory: by the cards, and by the other
// resources that its pods request, such as CPU. A unit that wouldn't fit doesn't count for its tenant's demand.
func (m *Manager) everFits(u *unit) bool {
	if u.kind.feasible == nil {
		requests := m.requests(u)
		fits := m.Ledger.FitsEmpty(requests)
		if !fits { // Otherwise mostly the first node has room.
			m.effort += len(requests[0].Nodes) / nodesPerEffort
		}
		u.kind.feasible = &fits
	}
	return *u.kind.feasible
}

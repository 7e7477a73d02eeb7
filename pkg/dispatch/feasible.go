package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

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
		// Mostly the first node has room. All nodes are checked only for a unit that fits none.
		counting := &countingCapacity{Capacity: m.EmptyCapacity()}
		fits := m.Ledger.FitsEmpty(m.requests(u), counting)
		m.effort += counting.asked / nodesPerEffort
		u.kind.feasible = &fits
	}
	return *u.kind.feasible
}

// countingCapacity counts the calls of Take. Its Capacity is nil if only GPU memory counts.
type countingCapacity struct {
	ledger.Capacity
	asked int
}

func (c *countingCapacity) Take(node string, uid gpu.PodUID) bool {
	c.asked++
	return c.Capacity == nil || c.Capacity.Take(node, uid)
}

func (c *countingCapacity) Return(node string, uid gpu.PodUID) {
	if c.Capacity != nil {
		c.Capacity.Return(node, uid)
	}
}

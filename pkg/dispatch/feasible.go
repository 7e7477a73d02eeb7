package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
)

const (
	// feasibleFor is how long results are kept. A change of a node drops them earlier. They also depend on pods without GPU memory, whose
	// changes drop nothing.
	feasibleFor = time.Minute
	// nodesPerEffort is how many checks of a node's other resources take as long as one attempt to reserve places, see maxEffort.
	nodesPerEffort = 32
)

// feasible keeps by kind whether units would fit if no pod had GPU memory.
type feasible struct {
	results map[kindKey]bool
	until   time.Time
}

// expire drops the results if they are too old.
func (f *feasible) expire(now time.Time) {
	if !now.Before(f.until) {
		clear(f.results)
		f.until = now.Add(feasibleFor)
	}
}

// everFits reports whether the unit would fit the nodes that its pods can use if no pod had GPU memory: by the cards, and by the other
// resources that its pods request, such as CPU. A unit that wouldn't fit doesn't count for its tenant's demand.
func (m *Manager) everFits(u *unit) bool {
	fits, known := m.feasible.results[u.kind.kindKey]
	if known {
		return fits
	}
	var capacity ledger.Capacity
	if m.EmptyCapacity != nil {
		capacity = m.EmptyCapacity()
	}
	requests := m.requests(u, false)
	if fits = m.Ledger.FitsEmpty(requests, capacity); !fits { // Otherwise mostly the first node has room.
		m.effort += len(requests[0].Nodes) / nodesPerEffort
	}
	m.feasible.results[u.kind.kindKey] = fits
	return fits
}

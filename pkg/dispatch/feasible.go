package dispatch

import (
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/ledger"
)

const (
	// feasibleFor is how long results are kept that no change of a node ends: pods without GPU memory, whose resources count, come
	// and go.
	feasibleFor = time.Minute
	// feasibleEffort is the effort of a result, see maxEffort: many of the nodes that would have room by their cards are asked for
	// their other resources.
	feasibleEffort = 128
)

// feasible keeps by kind whether units would fit if no pod had GPU memory.
type feasible struct {
	results map[unique.Handle[string]]bool
	until   time.Time
}

// expire drops the results if they are too old.
func (f *feasible) expire(now time.Time) {
	if f.results == nil || !now.Before(f.until) {
		f.results, f.until = map[unique.Handle[string]]bool{}, now.Add(feasibleFor)
	}
}

// everFits reports whether the unit would fit the nodes that its pods can use if no pod had GPU memory: by their cards, and by all else
// that pods request, such as CPU. A unit that wouldn't is no demand.
func (m *Manager) everFits(u *unit) bool {
	fits, known := m.feasible.results[u.item.Kind]
	if known {
		return fits
	}
	var capacity ledger.Capacity
	if m.EmptyCapacity != nil {
		capacity = m.EmptyCapacity()
		m.effort += feasibleEffort
	}
	fits = m.Ledger.FitsEmpty(m.requests(u, false), capacity)
	if m.feasible.results != nil {
		m.feasible.results[u.item.Kind] = fits
	}
	return fits
}

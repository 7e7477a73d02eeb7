package gang

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Startable returns the unbound members that the group must bind together, none if too few exist; and those that are placed
// alone because their run is running. Of these, urgent ones replace members of a run of which others run. Fair sharing places them before other
// pods of their tenant, unless a member of the run was bound less than the patience ago: a run that breaks again and again must not
// take all turns. While this process doesn't lead, Startable returns none.
func (mgr *Manager) Startable(key Key, now time.Time) (together, alone, urgent []gpu.PodUID) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	g := mgr.groups[key]
	if g == nil || !mgr.leading {
		return nil, nil, nil
	}
	for _, r := range g.runs {
		switch {
		case r.phase == PhaseRunning:
			lacks := 0
			if r.counts[bound] > 0 && !mgr.placesAlone(key) && now.Sub(r.lastBound()) >= mgr.Patience {
				lacks = r.need()
			}
			for i, m := range r.sorted((*member).awaitsBind) {
				if alone = append(alone, m.UID); i < lacks {
					urgent = append(urgent, m.UID)
				}
			}
		case r.phase != PhaseEvicting && r.enough():
			for _, m := range r.needed().members {
				together = append(together, m.UID)
			}
		}
	}
	return together, alone, urgent
}

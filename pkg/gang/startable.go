package gang

import (
	"github.com/gpushare/gpushare/pkg/gpu"
)

// Startable returns the unbound members that the group must bind together, none if too few exist; and those that are placed
// alone because their run is running. While this process doesn't lead, it returns none.
func (mgr *Manager) Startable(key Key) (together, alone []gpu.PodUID) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	g := mgr.groups[key]
	if g == nil || !mgr.leading {
		return nil, nil
	}
	for _, r := range g.runs {
		switch {
		case r.phase == PhaseRunning:
			for _, m := range r.sorted((*member).awaitsBind) {
				alone = append(alone, m.UID)
			}
		case r.phase != PhaseEvicting && r.enough():
			for _, m := range r.needed().members {
				together = append(together, m.UID)
			}
		}
	}
	return together, alone
}

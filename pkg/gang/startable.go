package gang

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Startable returns the unbound members that the group must bind together, none if too few exist; and those that are placed
// alone because their run is running. Of these, broken are what a run needs of which others run. They come first in the queue, with fair sharing
// before other pods of their tenant, unless a member of the run was bound less than the patience ago: a run that breaks again and again must not
// take all turns. While this process doesn't lead, Startable returns none.
func (mgr *Manager) Startable(key Key, now time.Time) (together, alone, broken []gpu.PodUID) {
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
					broken = append(broken, m.UID)
				}
			}
		case r.phase != PhaseEvicting && r.enough() && r.settled(now):
			for _, m := range r.needed().members {
				together = append(together, m.UID)
			}
		}
	}
	return together, alone, broken
}

// Shape returns the shape for which failures of the run are remembered whose members Startable returns together; empty if there is none.
func (mgr *Manager) Shape(key Key) string {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	if g := mgr.groups[key]; g != nil && mgr.leading {
		for _, r := range g.runs {
			if r.phase != PhaseRunning && r.phase != PhaseEvicting && r.enough() {
				return mgr.attempt(r).Shape
			}
		}
	}
	return ""
}

// Surplus returns the bound members without which each running run of the group still has its number of members: of each run the latest bound
// ones. Of a group whose members are placed alone these are all. If members disagree about the number, the smallest one counts. While this process
// doesn't lead, it returns none.
func (mgr *Manager) Surplus(key Key) (surplus []gpu.PodUID) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	g := mgr.groups[key]
	if g == nil || !mgr.leading {
		return nil
	}
	for _, r := range g.runs {
		n := r.counts[bound]
		if !mgr.placesAlone(key) && len(r.sizes) > 0 {
			n += r.finished - slices.Min(slices.Collect(maps.Keys(r.sizes)))
		}
		if r.phase != PhaseRunning || n <= 0 {
			continue
		}
		members := r.sorted(func(m *member) bool { return m.counted == bound })
		slices.SortStableFunc(members, func(a, b *member) int { return cmp.Or(b.BoundAt.Compare(a.BoundAt), compareAge(b, a)) })
		for _, m := range members[:min(n, len(members))] {
			surplus = append(surplus, m.UID)
		}
	}
	return surplus
}

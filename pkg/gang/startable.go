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
// take all turns. shape is that for which failures of the members that bind together are remembered; empty if there are none. Of several runs it is
// the first one's. While this process doesn't lead, Startable returns none.
func (mgr *Manager) Startable(key Key, now time.Time) (together, alone, broken []gpu.PodUID, shape string) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	g := mgr.groups[key]
	if g == nil || !mgr.leading {
		return nil, nil, nil, ""
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
			shape = cmp.Or(shape, mgr.profile(r).Shape)
			for _, m := range r.needed().members {
				together = append(together, m.UID)
			}
		}
	}
	return together, alone, broken, shape
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

package gang

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Startable are the unbound members of a group that may be placed.
type Startable struct {
	// Together are those that must be bound together; none if too few exist. Shape is their queue.Profile.ShapeKey.
	Together []gpu.PodUID
	Shape    string
	// Alone are those that are placed like single pods, because their run is running. Completing are those of them that a run needs of which others run.
	// They come first in the queue, with fair sharing before other pods of their tenant, unless a member of the run was bound less than the patience
	// ago: a run that breaks again and again must not take all turns.
	Alone, Completing []gpu.PodUID
}

// Startable returns the startable members of the group; none while this process doesn't lead.
func (mgr *Manager) Startable(key Key, now time.Time) (s Startable) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	g := mgr.groups[key]
	if g == nil || !mgr.leading {
		return Startable{}
	}
	for _, r := range g.runs {
		switch {
		case r.phase == PhaseRunning:
			lacks := 0
			if r.counts[bound] > 0 && !mgr.placesAlone(key) && now.Sub(r.lastBound()) >= mgr.Patience {
				lacks = r.lacking()
			}
			for i, m := range r.sorted((*member).awaitsBind) {
				s.Alone = append(s.Alone, m.UID)
				if i < lacks {
					s.Completing = append(s.Completing, m.UID)
				}
			}
		case r.phase != PhaseEvicting && r.enough() && r.membershipClear(now):
			s.Shape = mgr.profile(r).ShapeKey
			for _, m := range r.needed().members {
				s.Together = append(s.Together, m.UID)
			}
		}
	}
	return s
}

// Surplus returns the bound members without which each running run of the group still has its number of members: of each run the latest bound
// ones. Of a group whose members are placed alone these are all. If members disagree about the number, the smallest one counts. While this process
// doesn't lead, it returns none, nor does it of a PodGroup whose pods may only be disrupted together.
func (mgr *Manager) Surplus(key Key) (surplus []gpu.PodUID) {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	g := mgr.groups[key]
	if g == nil || !mgr.leading || mgr.podGroups[key].Together {
		return nil
	}
	for _, r := range g.runs {
		n := r.counts[bound]
		if !mgr.placesAlone(key) && len(r.sizes) > 0 {
			n += r.succeededCounted - slices.Min(slices.Collect(maps.Keys(r.sizes)))
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

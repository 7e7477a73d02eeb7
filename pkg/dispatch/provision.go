package dispatch

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// placeProvisioned reserves places for pods that were granted without one, before others take the nodes that were added for them. From
// then on their charges end like others.
func (m *Manager) placeProvisioned(all bool, capacity ledger.Capacity, now time.Time) {
	for _, u := range m.provisioned() {
		var places []ledger.Place
		if requests := m.requests(u, !all); requests != nil {
			places, _ = m.Ledger.ReserveAll(requests, nil, m.viewAt(now), capacity, now)
		}
		if places == nil {
			continue
		}
		for i, p := range u.pods {
			m.place(p, places[i], now)
		}
		m.effects.Requeue = true
	}
}

// provisioned returns the pods that were granted without a place, the oldest first, and members of a group together.
func (m *Manager) provisioned() (units []*unit) {
	pods := slices.DeleteFunc(slices.Collect(maps.Values(m.charged)), func(p *pod) bool { return p.charge != unplaced })
	slices.SortFunc(pods, func(a, b *pod) int { return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.UID, b.UID)) })
	groups := map[gang.Key]*unit{}
	for _, p := range pods {
		u := groups[p.Group]
		if u == nil || p.Group == (gang.Key{}) {
			u = &unit{}
			units, groups[p.Group] = append(units, u), u
		}
		u.pods = append(u.pods, p)
	}
	return units
}

// provision grants pods that fit nowhere now and would fit an empty node, unless this was tried recently and no node was added.
func (m *Manager) provision(now time.Time) {
	free := m.Provisioning
	for _, p := range m.charged {
		if p.charge == unplaced {
			free--
		}
	}
	r := m.queue.Round()
	for item, ok := r.Next(); ok && free > 0; item, ok = r.Next() {
		if u := item.Value.(*unit); m.obstacle(u) == reasons.ObstacleNoRoom && !m.makesRoom(u) && len(u.pods) <= free && u.mayProvision(now) {
			r.Grant()
			m.grant(u, nil, now)
			free -= len(u.pods)
		} else {
			r.Pass()
		}
	}
}

func (u *unit) mayProvision(now time.Time) bool {
	return !slices.ContainsFunc(u.pods, func(p *pod) bool { return now.Before(p.notProvisionedBefore) })
}

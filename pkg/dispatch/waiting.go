package dispatch

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Waiting returns the units that lack only memory, as items of the queue: of those of one tenant that are alike, the first. Priorities count within
// a tenant only, so all items get the same, and their turns have the order of the tenant. Units for which reclaim holds places aren't among them.
func (m *Manager) Waiting() []queue.Item {
	m.mu.Lock()
	defer m.mu.Unlock()
	type alike struct {
		tenant string
		kind   *kind
	}
	first := map[alike]*unit{}
	for _, u := range m.units {
		if u.paused || u.obstacle() != reasons.ObstacleNoRoom || m.hasHold(u) {
			continue
		}
		key := alike{u.item.Tenant, u.kind}
		if earliest := first[key]; earliest == nil || u.item.Before(&earliest.item.Item) {
			first[key] = u
		}
	}
	turns := map[string]int{}
	if len(first) > 0 {
		for i, s := range m.queue.Tenants() {
			turns[s.Name] = i + 1
		}
	}
	units := slices.SortedFunc(maps.Values(first), func(a, b *unit) int {
		return cmp.Or(cmp.Compare(turns[a.item.Tenant], turns[b.item.Tenant]), a.item.Compare(&b.item.Item))
	})
	items := make([]queue.Item, 0, len(units))
	for i, u := range units {
		items = append(items, queue.Item{
			Item:     ledger.Item{ID: u.item.ID, Label: u.label(), ByTurn: true, Priority: m.PriorityCutoff - 1, Entered: u.item.Entered},
			Turn:     i + 1,
			Profile:  u.profile(),
			RoomKey:  u.item.Tenant + "\x00" + text(u.kind.text) + "\x00" + u.kind.memory.String(),
			Requests: func() []ledger.Request { return m.waitingRequests(u) },
		})
	}
	return items
}

// label names the unit for users.
func (u *unit) label() string {
	p := u.pods[0]
	if p.Group == (gang.Key{}) {
		return "pod " + p.String()
	}
	return "group " + p.Group.String()
}

// waitingRequests returns the requests of the unit's pods with all nodes that they can use.
func (m *Manager) waitingRequests(u *unit) []ledger.Request {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.units[u.item.ID] != u {
		return nil
	}
	return m.requests(u)
}

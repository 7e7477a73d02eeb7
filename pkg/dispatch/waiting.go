package dispatch

import (
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Waiting returns the units that lack only memory, as items of the queue: of those of one tenant and one kind, the first. Priorities count within
// a tenant only, so all items get the same, and their turns have the order of the tenants. Units for which reclaim holds places aren't among them.
func (m *Manager) Waiting() []queue.Item {
	m.mu.Lock()
	defer m.mu.Unlock()
	items, seen := []queue.Item{}, map[tenantKind]bool{}
	for _, tenant := range m.queue.Tenants() {
		for _, waiting := range tenant.Waiting {
			u := waiting.Value.(*unit)
			if seen[u.tenantKind()] || u.obstacle() != reasons.ObstacleNoRoom || m.hasHold(u) {
				continue
			}
			seen[u.tenantKind()] = true
			items = append(items, queue.Item{
				Item:     ledger.Item{ID: u.item.ID, Label: u.label(), ByTurn: true, Priority: m.PriorityCutoff - 1, Entered: u.item.Entered},
				Turn:     len(items) + 1,
				Profile:  u.profile,
				RoomKey:  u.item.Tenant + "\x00" + text(u.kind.text) + "\x00" + u.kind.memory.String(),
				Requests: func() []ledger.Request { return m.waitingRequests(u) },
			})
		}
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

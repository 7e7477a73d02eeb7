package dispatch

import (
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Waiting returns the items that lack only memory, for package queue: of those of one tenant and one kind, the first. Priorities count within
// a tenant only, so all items get the same, and their turns have the order of the tenants. Items for which reclaim holds places aren't among them.
func (m *Manager) Waiting() []queue.Item {
	m.mu.Lock()
	defer m.mu.Unlock()
	items := []queue.Item{}
	for _, it := range m.firstItems(func(it *item) bool { return it.obstacle() == reasons.ObstacleNoRoom }) {
		items = append(items, queue.Item{
			Item:     ledger.Item{ID: it.ID, Label: it.label(), ByTurn: true, Priority: m.PriorityCutoff - 1, Entered: it.Entered},
			Turn:     len(items) + 1,
			Profile:  it.profile,
			RoomKey:  it.Tenant + "\x00" + it.kind.key.Value(),
			Requests: func() []ledger.Request { return m.waitingRequests(it) },
		})
	}
	return items
}

// firstItems returns the items that pass and for which reclaim holds no places, of those of one tenant and one kind the first, in the order of the queue.
func (m *Manager) firstItems(pass func(*item) bool) (items []*item) {
	seen := map[tenantKind]bool{}
	for _, tenant := range m.queue.Tenants() {
		for _, waiting := range tenant.Waiting {
			if it := waiting.Value.(*item); !seen[it.tenantKind()] && pass(it) && !m.hasHold(it) {
				seen[it.tenantKind()] = true
				items = append(items, it)
			}
		}
	}
	return items
}

// label names the item for users.
func (it *item) label() string {
	p := it.pods[0]
	if p.Group == (gang.Key{}) {
		return "pod " + p.String()
	}
	return "group " + p.Group.String()
}

// waitingRequests returns the requests of the item's pods with all nodes that they can use.
func (m *Manager) waitingRequests(it *item) []ledger.Request {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.items[it.ID] != it {
		return nil
	}
	return m.requests(it)
}

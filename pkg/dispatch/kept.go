package dispatch

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// keepFor is how long the memory of a pod that has ended is kept for its tenant: longer than most controllers take to create the next pod.
const keepFor = 10 * time.Second

// kept is the memory of a pod that has ended, reserved for the next pod of its tenant. Without it, a tenant whose pods run for minutes would lose its
// share to others, pod by pod, and need evictions to get it back.
type kept struct {
	tenant string
	// Pod is the pod that has ended.
	*Pod
	until time.Time
}

// id returns the ID of the reservation.
func (k *kept) id() string { return string(k.UID) }

// keepEnded keeps the memory of the pods that have ended since the latest round.
func (m *Manager) keepEnded() {
	if len(m.ended) == 0 {
		return
	}
	waiting := m.firstItems(func(it *item) bool { return !it.obstacle().Infeasible() }) // Once: thousands can wait, and hundreds end.
	for _, k := range m.ended {
		if !m.now.Before(k.until) || !m.mayKeep(k, waiting) {
			continue
		}
		m.Ledger.AddReservation(k.id(), ledger.Reservation{
			Source: ledger.Kept, Item: ledger.Item{ID: k.id()}, Priority: m.PriorityCutoff - 1, Places: []ledger.Place{{Pod: k.Pod.Pod, Node: k.Node}},
		})
		m.kept[k.tenant] = append(m.kept[k.tenant], k)
	}
	m.ended = nil
}

// mayKeep reports whether other tenants wait, and none of them may take the memory now: a tenant may if one of its items fits the node, and the tenant
// would still have less with this item, in proportion to its terms, than k's tenant had before its pods ended.
func (m *Manager) mayKeep(k *kept, waiting []*item) bool {
	memory := k.Request
	for _, other := range m.kept[k.tenant] {
		memory = memory.Add(other.Request)
	}
	wait, failed := false, map[*kind]bool{}
	for _, it := range waiting {
		if it.Tenant == k.tenant {
			continue
		}
		wait = true
		if failed[it.kind] || m.queue.Reaches(it.Tenant, it.Memory, k.tenant, memory) {
			continue
		}
		if _, fits := m.Ledger.FirstFit(it.pods[0].Pod.Pod, m.Nodes.UsableAmong(it.pods[0].Constraints, []string{k.Node})); fits {
			return false
		}
		failed[it.kind] = true
	}
	return wait
}

// endKept ends the reservations for which ends returns true.
func (m *Manager) endKept(ends func(*kept) bool) {
	for _, tenant := range slices.Sorted(maps.Keys(m.kept)) {
		m.endKeptFor(tenant, ends)
	}
}

// endKeptFor ends those of the tenant for which ends returns true.
func (m *Manager) endKeptFor(tenant string, ends func(*kept) bool) {
	if len(m.kept[tenant]) == 0 { // As for nearly all of thousands of items in a round.
		return
	}
	m.kept[tenant] = slices.DeleteFunc(m.kept[tenant], func(k *kept) bool {
		if !ends(k) {
			return false
		}
		m.Ledger.End(ledger.Kept, k.id())
		return true
	})
	if len(m.kept[tenant]) == 0 {
		delete(m.kept, tenant)
	}
}

// nextCame ends what is kept for a tenant's next pod, which has come: one reservation for each place that it got, that on the same node if there is
// one; all of them if it found no room.
func (m *Manager) nextCame(tenant string, places []ledger.ChosenNode) {
	if places == nil {
		m.endKeptFor(tenant, func(*kept) bool { return true })
	}
	for _, place := range places {
		var used *kept
		for _, k := range m.kept[tenant] {
			if used == nil || used.Node != place.Node {
				used = k
			}
		}
		m.endKeptFor(tenant, func(k *kept) bool { return k == used })
	}
}

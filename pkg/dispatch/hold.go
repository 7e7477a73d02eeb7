package dispatch

import (
	"maps"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// hold keeps the places of an item until its victims are gone. What these have freed is the item's, also if its tenant's share is smaller meanwhile: a
// share can be so for a moment, while a node can't be used or a third tenant has a pod, and pods would be evicted for the item again after it.
type hold struct {
	tenantKind
	// itemID is the ID of the item.
	itemID string
	// ends is when the hold ends; zero while the evictions are made.
	ends time.Time
	// reservation is what the ledger keeps: the places, and as Victims all pods on their nodes that must end, also those that are evicted for others.
	reservation ledger.Reservation
	// evicts is true if pods are evicted for the item, not only for others.
	evicts bool
	// memory is what the places have together. The queue counts it: otherwise later pods of the tenant would be granted memory that belongs to its
	// share and is held for its earlier pods.
	memory gpu.Memory
}

// isEvicting reports whether the evictions for the item are being made.
func (h *hold) isEvicting() bool { return h.ends.IsZero() }

// Hold holds the places of a plan for a search, before anything is evicted. It must be called once for a search, and reports whether the plan is
// still right: the items still wait and ask for the same, their tenants are still below their share, and the victims may still be evicted: their
// tenants are above their share, and their groups have the same members. It checks the victims without the Manager's lock.
func (m *Manager) Hold(s *Search, plan reclaim.Plan) bool {
	present := m.searchAgain()
	m.setShares(present.standings)
	return m.addHolds(s, present, plan, present.evictable(plan))
}

// searchAgain returns a search in the present state.
func (m *Manager) searchAgain() *Search {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.search(m.takeStandings())
}

// addHolds holds the places of a plan for a search if its victims are evictable and its items still wait, according to the present state.
func (m *Manager) addHolds(s, present *Search, plan reclaim.Plan, evictable bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.reclaims.search != s { // The term has ended.
		return false
	}
	holds, wrong := m.newHolds(present, plan)
	switch {
	case wrong != "": // Other tenants need no pause.
		delete(m.reclaims.pauses, tenantKind{tenant: wrong})
		pause(m.reclaims.pauses, tenantKind{tenant: wrong}, m.now, queue.LongestPause)
	case !evictable:
		m.reclaims.next = m.now.Add(queue.Retry)
	default:
		for _, h := range holds {
			m.reclaims.holds[h.itemID] = h
			m.Ledger.AddReservation(h.itemID, h.reservation)
			m.queue.Charge(h.tenant, h.memory)
		}
		return true
	}
	m.reclaims.search = nil // Something has changed while the plan was made.
	return false
}

// newHolds returns the holds for the items of a plan. wrong is the tenant of the first item that no longer waits with the same pods and requests; empty
// if there is none.
func (m *Manager) newHolds(present *Search, plan reclaim.Plan) (holds []*hold, wrong string) {
	eligible := map[*item]bool{}
	for _, s := range m.starving(present.standings) {
		for _, it := range s.items {
			eligible[it] = true
		}
	}
	for _, s := range plan.Served {
		h := &hold{
			tenantKind: tenantKind{tenant: s.Tenant}, itemID: s.ID,
			reservation: ledger.Reservation{Source: ledger.Reclaimed, Priority: m.PriorityCutoff - 1, Victims: s.Awaited},
			evicts:      slices.ContainsFunc(plan.Victims, func(e reclaim.Eviction) bool { return e.For.ID == s.ID }),
		}
		for j, place := range s.Places {
			h.reservation.Places = append(h.reservation.Places, ledger.Place{Pod: s.Pods[j].Pod, Node: place.Node, On: place.On})
			h.memory = h.memory.Add(place.On.Total())
		}
		it := m.itemOf(h)
		if it == nil || !eligible[it] || !m.mayUsePlaces(h) {
			return nil, s.Tenant
		}
		h.tenantKind = it.tenantKind()
		holds = append(holds, h)
	}
	return holds, ""
}

// evictable reports whether the victims of a plan may still be evicted.
func (s *Search) evictable(plan reclaim.Plan) bool {
	if len(plan.Victims) == 0 {
		return true
	}
	tenants, lost := s.excess(), map[string]gpu.Memory{}
	present := map[gpu.PodUID][]reclaim.Victim{} // By the first pod: a surplus member can be the first one of its group too.
	for _, v := range s.candidates() {
		first := v.Pods[0].UID
		present[first] = append(present[first], v)
	}
	return !slices.ContainsFunc(plan.Victims, func(e reclaim.Eviction) bool {
		same := present[e.Pods[0].UID]
		i := slices.IndexFunc(same, func(v reclaim.Victim) bool { return v.Tenant == e.Tenant && slices.EqualFunc(v.Pods, e.Pods, samePod) })
		if i < 0 {
			return true
		}
		lost[e.Tenant] = lost[e.Tenant].Add(same[i].Memory())
		return lost[e.Tenant] > tenants[e.Tenant].Excess
	})
}

// samePod reports whether the pods are the same one. It compares no requests: a user can change the number of cards in the label of a running
// pod, which has no effect.
func samePod(a, b gpu.Pod) bool { return a.UID == b.UID }

// mayUsePlaces reports whether the pods can still use the nodes of their places.
func (m *Manager) mayUsePlaces(h *hold) bool {
	return !slices.ContainsFunc(h.reservation.Places, func(place ledger.Place) bool {
		return len(m.Nodes.UsableAmong(m.pods[place.Pod.UID].Constraints, []string{place.Node})) == 0
	})
}

// itemOf returns the item for which the places are held, if it still waits, has the same pods with the same requests, and belongs to the same tenant;
// else nil.
func (m *Manager) itemOf(h *hold) *item {
	it := m.items[h.itemID]
	other := func(place ledger.Place) bool {
		p := m.pods[place.Pod.UID]
		return p == nil || p.item != it || p.Pod.Pod != place.Pod
	}
	if it == nil || len(it.pods) != len(h.reservation.Places) || it.Tenant != h.tenant || slices.ContainsFunc(h.reservation.Places, other) {
		return nil
	}
	return it
}

// grantHeld grants the items for which there is room now at their held places, and ends the holds for items that don't wait any more. A tenant that
// withdraws an item for which pods were evicted pauses, until an item gets what is held for it: otherwise pods would be evicted again and again without use.
func (m *Manager) grantHeld() {
	m.endHolds(func(h *hold) bool {
		it := m.itemOf(h)
		if h.isEvicting() || it != nil && !m.grantHold(h, it) {
			return false
		}
		if granted := m.allocated[h.reservation.Places[0].Pod.UID] != nil; granted { // Here or elsewhere.
			delete(m.reclaims.withdrawn, h.tenant)
		} else if h.evicts {
			pause(m.reclaims.withdrawn, h.tenant, m.now, longestWasted)
		}
		return true
	})
}

// grantHold grants an item at its held places, if there is room.
func (m *Manager) grantHold(h *hold, it *item) (granted bool) {
	if !m.mayUsePlaces(h) {
		return false
	}
	requests := make([]ledger.Request, len(h.reservation.Places)) // In the order of the item's pods.
	for i, place := range h.reservation.Places {
		requests[i] = ledger.Request{Pod: place.Pod, Nodes: []string{place.Node}}
	}
	places, _ := m.Ledger.ReserveAll(requests, nil, m.View, m.now)
	if places == nil {
		return false
	}
	m.queue.Charge(it.Tenant, it.Memory)
	m.grantItem(it, places)
	return true
}

// hasHold reports whether the places of the item are held until pods have ended there.
func (m *Manager) hasHold(it *item) bool { return m.reclaims.holds[it.ID] != nil }

// endHolds ends the holds for which ends returns true.
func (m *Manager) endHolds(ends func(*hold) bool) {
	for _, id := range slices.Sorted(maps.Keys(m.reclaims.holds)) {
		if h := m.reclaims.holds[id]; ends(h) {
			delete(m.reclaims.holds, id)
			m.Ledger.End(ledger.Reclaimed, id)
			m.queue.Release(h.tenant, h.memory)
			m.setTerms(h.tenant) // Its namespaces may be gone.
		}
	}
}

// endLateHolds ends the holds whose places weren't free in time.
func (m *Manager) endLateHolds() {
	m.endHolds(func(h *hold) bool {
		if h.isEvicting() || m.now.Before(h.ends) {
			return false
		}
		pause(m.reclaims.pauses, h.tenantKind, m.now, queue.LongestPause)
		m.Observer.ReclaimFailed()
		return true
	})
}

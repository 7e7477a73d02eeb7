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

// heldUnit is a unit for which places are held until its victims are gone.
type heldUnit struct {
	reclaimKind
	// Reservation has the places, and as Victims the awaited ones on their nodes.
	ledger.Reservation
	attempt uint64
	state   holdState
	// until is when the hold ends. It isn't known while the evictions are made.
	until time.Time
	// allocated is what its tenant had when the places were held.
	allocated gpu.Memory
}

// holdState is how far a hold is.
//
//	          → making   Hold
//	making    → waiting  Reclaimed: victims were evicted
//	waiting   → freed    no victim has memory any more
//	any       → none     the unit is granted, or doesn't wait any more; its tenant has its share; until is over; nothing was evicted; the term ends
type holdState int

const (
	making holdState = iota
	waiting
	freed
)

// Hold holds the places of a plan for an attempt, before anything is evicted. It reports whether the plan is still right: the units
// still wait and ask for the same, their tenants are still below their share, and the victims may still be evicted: their tenants are
// above their share, and their groups have the same members. It checks the victims without the Manager's lock.
func (m *Manager) Hold(attempt uint64, plan reclaim.Plan, now time.Time) bool {
	search := m.beginHold(attempt, now)
	if search == nil {
		return false
	}
	m.setShares(search.standings)
	return m.endHold(search, plan, search.evictable(plan))
}

// beginHold returns a search for an attempt; nil if the attempt has ended.
func (m *Manager) beginHold(attempt uint64, now time.Time) *Search {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.attemptToHold(attempt) == nil {
		return nil
	}
	return m.search(attempt, m.standings(), now)
}

// endHold holds the places of a plan if its victims are evictable and its units still wait.
func (m *Manager) endHold(search *Search, plan reclaim.Plan, evictable bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	a := m.attemptToHold(search.Attempt())
	switch {
	case a == nil:
		return false
	case !evictable:
		a.outdated = true
		return false
	}
	held, wrong := m.heldUnits(plan, unitsOf(m.starving(search.standings, search.now)))
	if wrong != nil {
		a.kinds = map[gpu.PodUID]reclaimKind{wrong.Pods[0].UID: {tenant: wrong.Tenant}} // Other tenants need no pause.
		a.outdated = true
		return false
	}
	for _, kind := range a.kinds {
		if !slices.ContainsFunc(held, func(h *heldUnit) bool { return h.reclaimKind == kind }) {
			m.reclaims.pause(kind, true, search.now)
		}
	}
	allocated := map[string]gpu.Memory{}
	for _, t := range search.tenants {
		allocated[t.Name] = t.Allocated
	}
	for _, h := range held {
		h.attempt, h.allocated = a.number, allocated[h.tenant]
	}
	for _, v := range plan.Victims {
		for _, pod := range v.Pods {
			m.reclaims.ending[pod.UID] = a.number
		}
	}
	a.state, m.reclaims.held = evicting, append(m.reclaims.held, held...)
	m.updateHold()
	return true
}

// attemptToHold returns the attempt with that number, if no places are held for it yet; else nil.
func (m *Manager) attemptToHold(number uint64) *attempt {
	if a := m.reclaims.attempt; m.leading && a != nil && a.number == number && a.state == planning {
		return a
	}
	return nil
}

// heldUnits returns the units for which a plan has places. wrong is the first unit that no longer waits with the same pods and requests; nil
// if there is none.
func (m *Manager) heldUnits(plan reclaim.Plan, eligible map[*unit]bool) (held []*heldUnit, wrong *reclaim.Served) {
	for i := range plan.Served {
		s := &plan.Served[i]
		h := &heldUnit{
			reclaimKind: reclaimKind{tenant: s.Tenant},
			Reservation: ledger.Reservation{Source: ledger.Reclaimed, Priority: m.PriorityCutoff - 1, Victims: s.Awaited},
		}
		for j, place := range s.Places {
			h.Shares = append(h.Shares, ledger.Share{Pod: s.Pods[j].Pod, Node: place.Node, On: place.On})
		}
		u := m.unitOf(h)
		if u == nil || !eligible[u] || !m.unchanged(s) {
			return nil, s
		}
		h.reclaimKind = u.reclaimKind()
		held = append(held, h)
	}
	return held, nil
}

// evictable reports whether the victims of a plan may still be evicted.
func (s *Search) evictable(plan reclaim.Plan) bool {
	if len(plan.Victims) == 0 {
		return true
	}
	type id struct { // A surplus member can be the first one of its group too.
		first gpu.PodUID
		pods  int
	}
	standings, lost, present := s.excess(), map[string]gpu.Memory{}, map[id]reclaim.Victim{}
	for _, v := range s.candidates() {
		present[id{v.Pods[0].UID, len(v.Pods)}] = v
	}
	return !slices.ContainsFunc(plan.Victims, func(e reclaim.Eviction) bool {
		v := present[id{e.Pods[0].UID, len(e.Pods)}]
		lost[v.Tenant] = lost[v.Tenant].Add(v.Memory())
		return v.Tenant != e.Tenant || !slices.EqualFunc(v.Pods, e.Pods, samePod) || lost[v.Tenant] > standings[v.Tenant].Excess
	})
}

// samePod reports whether the pods are the same one. It compares no requests: a user can change the number of cards in the label of a running
// pod, which has no effect.
func samePod(a, b gpu.Pod) bool { return a.UID == b.UID }

// unchanged reports whether the pods still have the same requests, and can still use the nodes of their places.
func (m *Manager) unchanged(s *reclaim.Served) bool {
	for i, served := range s.Pods {
		p := m.pods[served.UID]
		if !m.mayUse(p, s.Places[i].Node) || p.Pod.Pod != served.Pod {
			return false
		}
	}
	return true
}

// unitOf returns the unit for which the places are held, if it still waits, has the same pods, and belongs to the same tenant; else nil.
func (m *Manager) unitOf(h *heldUnit) *unit {
	var u *unit
	for i := range h.Shares {
		p := m.pods[h.Shares[i].Pod.UID]
		if p == nil || p.unit == nil || u != nil && p.unit != u {
			return nil
		}
		u = p.unit
	}
	if len(u.pods) != len(h.Shares) || u.item.Tenant != h.tenant {
		return nil
	}
	return u
}

// updateHold makes the ledger hold the places of all held units. What they need besides GPU memory counts as taken too.
func (m *Manager) updateHold() {
	var held []ledger.Reservation
	former := m.reclaims.charged
	for name, amount := range former {
		m.queue.Release(name, amount)
	}
	m.reclaims.charged, m.reclaims.heldFor = map[string]gpu.Memory{}, map[gpu.PodUID]*heldUnit{}
	for _, h := range m.reclaims.held {
		held = append(held, h.Reservation)
		for _, share := range h.Shares {
			m.reclaims.charged[h.tenant] = m.reclaims.charged[h.tenant].Add(share.On.Total())
			m.reclaims.heldFor[share.Pod.UID] = h
		}
	}
	for name, amount := range m.reclaims.charged {
		m.queue.Charge(name, amount)
	}
	for name := range former {
		m.setTerms(name) // Its namespaces may be gone.
	}
	m.Ledger.SetReservations(ledger.Reclaimed, held...)
}

// grantHeld grants the units for which there is room now at their held places.
func (m *Manager) grantHeld(now time.Time) {
	if len(m.reclaims.held) == 0 {
		return
	}
	capacity := m.capacity(false) // The plans have counted what all of them need.
	m.endHolds(func(h *heldUnit) bool { return h.state != making && m.grantUnit(h, capacity, now) })
}

// grantUnit grants a unit at its held places, if there is room.
func (m *Manager) grantUnit(h *heldUnit, capacity ledger.Capacity, now time.Time) (granted bool) {
	u := m.unitOf(h)
	if u == nil {
		return false
	}
	requests := make([]ledger.Request, len(h.Shares)) // In the order of the unit's pods.
	for i, share := range h.Shares {
		if !m.mayUse(m.pods[share.Pod.UID], share.Node) {
			return false
		}
		requests[i] = ledger.Request{Pod: share.Pod, Nodes: []string{share.Node}}
	}
	places, _ := m.Ledger.ReserveAll(requests, nil, m.View, capacity, now)
	if places == nil {
		return false
	}
	m.queue.Charge(u.item.Tenant, u.item.Memory)
	m.grant(u, places, now)
	u.pods[0].turn.madeRoom = h.reclaimKind
	return true
}

// makesRoom reports whether pods are evicted for the unit and its places are held.
func (m *Manager) makesRoom(u *unit) bool { return m.reclaims.heldFor[u.pods[0].UID] != nil }

// endHolds ends the holds for the units for which ends returns true.
func (m *Manager) endHolds(ends func(*heldUnit) bool) {
	r := &m.reclaims
	before := len(r.held)
	if r.held = slices.DeleteFunc(r.held, ends); len(r.held) == before {
		return
	}
	present := map[uint64]bool{}
	for _, h := range r.held {
		present[h.attempt] = true
	}
	maps.DeleteFunc(r.ending, func(_ gpu.PodUID, attempt uint64) bool { return !present[attempt] })
	m.updateHold()
}

// endFailedHolds ends the holds for units that don't wait any more, whose tenants are not below their share, whose victims don't end in
// time, or that still had no room some time after the victims had ended.
func (m *Manager) endFailedHolds(starving []starvingTenant, now time.Time) {
	eligible := unitsOf(starving)
	m.endHolds(func(h *heldUnit) bool {
		if h.state == making {
			return false
		}
		// If something has changed since the state that starving is from, the next round makes the units of groups again.
		if u := m.unitOf(h); !m.changed && (u == nil || !eligible[u]) {
			return true
		}
		if h.state == waiting && !slices.ContainsFunc(h.Victims, m.holdsMemory) {
			h.state, h.until = freed, now.Add(queue.Arrival)
		}
		failed := !now.Before(h.until)
		if failed {
			m.reclaims.pause(h.reclaimKind, true, now)
			m.Observer.ReclaimFailed()
		}
		return failed
	})
}

// dropHold ends the hold for the unit of the pod, if there is one.
func (m *Manager) dropHold(uid gpu.PodUID) {
	if dropped := m.reclaims.heldFor[uid]; dropped != nil {
		m.endHolds(func(h *heldUnit) bool { return h == dropped })
	}
}

// holdsMemory reports whether the pod is bound and hasn't ended.
func (m *Manager) holdsMemory(uid gpu.PodUID) bool {
	p := m.pods[uid]
	return p != nil && p.Node != "" && !p.Ended
}

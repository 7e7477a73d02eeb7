package dispatch

import (
	"maps"
	"slices"
	"sync"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// places are the places that belong to a Manager, by node: the reserved places of granted pods, and the held places. mu guards the fields
// below it. No other lock is taken while mu is held.
type places struct {
	mu     sync.Mutex
	nodeOf map[gpu.PodUID]string
	on     map[string]map[gpu.PodUID]struct{}
	held   map[string][]gpu.PodUID
}

// hold sets the held places.
func (p *places) hold(held []ledger.Reservation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = map[string][]gpu.PodUID{}
	for _, r := range held {
		for _, share := range r.Shares {
			p.held[share.Node] = append(p.held[share.Node], share.Pod.UID)
		}
	}
}

func (p *places) add(uid gpu.PodUID, node string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.nodeOf == nil {
		p.nodeOf, p.on = map[gpu.PodUID]string{}, map[string]map[gpu.PodUID]struct{}{}
	}
	p.nodeOf[uid] = node
	if p.on[node] == nil {
		p.on[node] = map[gpu.PodUID]struct{}{}
	}
	p.on[node][uid] = struct{}{}
}

// remove reports whether the pod had a place.
func (p *places) remove(uid gpu.PodUID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	node, had := p.nodeOf[uid]
	if !had {
		return false
	}
	delete(p.nodeOf, uid)
	if delete(p.on[node], uid); len(p.on[node]) == 0 {
		delete(p.on, node)
	}
	return true
}

// PlacesOn returns the granted pods that have a reserved place on the node and are not bound yet. With withHeld it also returns the pods
// that have a held place there. It can be called with other locks held: it takes only the lock of places.
func (m *Manager) PlacesOn(node string, withHeld bool) []gpu.PodUID {
	m.places.mu.Lock()
	defer m.places.mu.Unlock()
	uids := slices.Sorted(maps.Keys(m.places.on[node]))
	if withHeld {
		uids = append(uids, m.places.held[node]...)
	}
	return uids
}

// GiveUpPlace releases the reserved place of a pod that is about to get another place: from its group's plan, or because the node of its
// place is not a candidate node. The pod keeps its charge. GiveUpPlace reports whether there was a place.
func (m *Manager) GiveUpPlace(uid gpu.PodUID) bool {
	if !m.places.remove(uid) {
		return false
	}
	m.Release(uid)
	return true
}

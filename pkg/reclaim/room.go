package reclaim

import (
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// room holds the places in other regions that a victim that moves is expected to get.
type room struct {
	places []Place
	// later are the candidates that a later attempt evicts to free these places.
	later []int
}

// mover is equal for victims for which the same places elsewhere are suitable. For a group it is that of the first pod.
type mover struct {
	tenant string
	spot   Spot
	demand gpu.Demand
	pods   int
}

func moverOf(v *Victim) mover { return mover{v.Tenant, v.Spots[0], v.Pods[0].Demand(), len(v.Pods)} }

// makeRoom evicts the cheapest candidates for a pod of a unit, and returns their node. Candidates that must move are considered only if no
// others make room, and only if there is room for them elsewhere.
func (t *trial) makeRoom(unit int, pod Pod) (node string, ok bool) {
	best := t.cheapest(pod)
	if best != nil {
		return best.node, t.evictAll(best, unit)
	}
	for t.need.Regions != nil {
		if best = t.cheapestMove(t.need.Units[unit].Tenant, pod); best == nil {
			break
		}
		if t.evictAll(best, unit) {
			return best.node, true
		}
	}
	return "", false
}

// evictAll makes the candidates of an option victims of a unit. If one of them must move and there is no room for it elsewhere, evictAll
// evicts none and returns false.
func (t *trial) evictAll(o *option, unit int) bool {
	for _, v := range o.victims {
		t.moves[v] = !t.tally.WithinExcess(&t.need.Victims[v])
		t.evict(v)
		t.unitOf[v] = unit
	}
	for _, v := range o.victims {
		if t.moves[v] && !t.findRoom(v, o.node) {
			t.stuck[moverOf(&t.need.Victims[v])] = true
			for _, v := range o.victims {
				t.keep(v)
			}
			return false
		}
	}
	return true
}

// findRoom finds places in other regions for the pods of a victim that moves: free places, or places that candidates within the excess of
// their tenants can free. It reports whether it has found places for all pods. It doesn't use the node freed, whose memory is for a unit.
func (t *trial) findRoom(v int, freed string) bool {
	victim := &t.need.Victims[v]
	r := &room{}
	t.rooms[v] = r
	for i := range victim.Pods {
		demand, spot := victim.Pods[i].Demand(), victim.Spots[i]
		elsewhere := func(node string) bool {
			region, shared := t.need.Regions[node]
			return shared && node != freed && region != spot.Region && slices.Contains(t.need.Classes[spot.Class], region)
		}
		if t.placeElsewhere(r, &demand, elsewhere) {
			continue
		}
		best := t.cheapestAmong("", demand, elsewhere)
		if best == nil {
			t.dropRoom(v)
			return false
		}
		for _, later := range best.victims {
			t.evict(later)
			t.later[later], r.later = true, append(r.later, later)
		}
		t.placeElsewhere(r, &demand, func(node string) bool { return node == best.node })
	}
	return true
}

// placeElsewhere adds a place to r on the first node for which among returns true and whose cards have room. It reports whether there is one.
func (t *trial) placeElsewhere(r *room, demand *gpu.Demand, among func(node string) bool) bool {
	if t.nodes == nil {
		t.nodes = slices.Sorted(maps.Keys(t.cluster.Cards))
	}
	for _, node := range t.nodes {
		if !among(node) {
			continue
		}
		if where, reason := placement.Place(placement.Expected, t.present(node), *demand); reason == reasons.Fits {
			change(t.cardsOf(node), where, (*placement.Card).Add)
			r.places = append(r.places, Place{node, where})
			return true
		}
	}
	return false
}

// freedLater reports whether the trial counts candidates on the node as gone although only a later attempt evicts them. Their memory is not
// free for the units of this attempt, so such a node isn't used.
func (t *trial) freedLater(node string) bool {
	for v := range t.later {
		if slices.ContainsFunc(t.need.Victims[v].Pods, func(p gpu.Pod) bool { return t.cluster.Places[p.UID].Node == node }) {
			return true
		}
	}
	return false
}

// dropRoom undoes findRoom.
func (t *trial) dropRoom(v int) {
	r := t.rooms[v]
	if r == nil {
		return
	}
	delete(t.rooms, v)
	for _, place := range r.places {
		Free(t.cardsOf(place.Node), place.On)
	}
	for _, later := range r.later {
		delete(t.later, later)
		t.restore(later)
	}
}

// keep undoes the eviction of a victim, and drops its room elsewhere.
func (t *trial) keep(v int) {
	t.dropRoom(v)
	t.restore(v)
}

// victims returns the victims from a position in evicted on, without candidates that only a later attempt evicts.
func (t *trial) victims(from int) []int {
	return slices.DeleteFunc(slices.Clone(t.evicted[from:]), func(v int) bool { return t.later[v] })
}

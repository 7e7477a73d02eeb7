package reclaim

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Choose returns the plan: the victims to evict, and the items that then have room, with the places of their pods. It returns false if no
// item gets room.
//
// The pods of the items are placed one by one. For each pod that fits nowhere, Choose takes the place for which the least memory must be
// evicted. Of equally good places it takes the one whose oldest victim is the newest, and then the one with the fewest victims. Finally it
// drops each victim without which its item still fits. It doesn't search for the set with the least memory for several pods together. The cluster must
// not be used afterwards: Choose counts the plan there.
func Choose(need Need, cluster Cluster) (Plan, bool) {
	t := newTrial(need, cluster)
	for i := range need.Items {
		t.serve(i)
	}
	t.dropUnneeded()
	plan := t.plan()
	return plan, len(plan.Served) > 0
}

// serve makes room for all pods of an item, or for none.
func (t *trial) serve(item int) {
	for _, pod := range t.need.Items[item].Pods {
		if t.placeSomewhere(item) {
			continue
		}
		best := t.cheapest(pod)
		if best != nil {
			for _, v := range best.victims {
				t.evict(v)
				t.itemOf[v] = item
			}
		}
		if best == nil || !t.place(item, best.node) {
			t.unplace(item)
			for v, of := range t.itemOf {
				if of == item {
					t.restore(v)
					delete(t.itemOf, v)
				}
			}
			return
		}
	}
}

// trial is a change of the cluster.
type trial struct {
	need    Need
	cluster Cluster
	// on holds, for each node, the positions of the candidates that have a pod there, in their order. order are the nodes in on, the node
	// with the newest candidate first.
	on    map[string][]int
	order []string
	// gone are the pods of the victims so far. lost is the memory of the victims, by tenant.
	gone map[gpu.PodUID]bool
	lost map[string]gpu.Memory
	// ended are the pods of each node that count as gone: those that are being deleted, and those of the victims. placed are the pods with places.
	ended  map[string][]gpu.PodUID
	placed map[string][]gpu.Pod
	// itemOf has the victims so far, each with the item for which it was chosen.
	itemOf map[int]int
	// places are the places of each item's pods; nil for an item that has none.
	places [][]Place
	// steps is how many steps all searches together may still take.
	steps int
}

func newTrial(need Need, cluster Cluster) *trial {
	t := &trial{
		need: need, cluster: cluster, on: map[string][]int{},
		gone: map[gpu.PodUID]bool{}, lost: map[string]gpu.Memory{}, ended: map[string][]gpu.PodUID{}, placed: map[string][]gpu.Pod{},
		itemOf: map[int]int{}, places: make([][]Place, len(need.Items)), steps: maxSteps,
	}
	for node, leaving := range cluster.Leaving {
		t.ended[node] = slices.Clone(leaving)
	}
	for i, v := range need.Victims {
		if slices.ContainsFunc(v.Pods, func(p gpu.Pod) bool { _, known := cluster.Places[p.UID]; return !known }) {
			continue
		}
		for _, p := range v.Pods {
			node := cluster.Places[p.UID].Node
			on := t.on[node]
			if len(on) == 0 {
				t.order = append(t.order, node)
			}
			if len(on) == 0 || on[len(on)-1] != i {
				t.on[node] = append(on, i)
			}
		}
	}
	return t
}

// isGone reports whether the candidate is a victim, or one of its pods is in another victim.
func (t *trial) isGone(v int) bool {
	return slices.ContainsFunc(t.need.Victims[v].Pods, func(p gpu.Pod) bool { return t.gone[p.UID] })
}

// mayEvict reports whether the candidate may be evicted in addition to the victims so far.
func (t *trial) mayEvict(v int) bool {
	if t.isGone(v) {
		return false
	}
	t.count(v, -1)
	defer t.count(v, 1)
	victim := t.need.Victims[v]
	return t.lost[victim.Tenant] <= t.need.Tenants[victim.Tenant].Excess && !slices.ContainsFunc(victim.Pods, func(p gpu.Pod) bool {
		return slices.ContainsFunc(t.cluster.Budgets[p.UID], func(budget int) bool { return t.cluster.Allowed[budget] < 0 })
	})
}

// evict makes the candidate a victim.
func (t *trial) evict(v int) {
	t.count(v, -1)
	for _, p := range t.need.Victims[v].Pods {
		place := t.cluster.Places[p.UID]
		placement.Release(t.cluster.Cards[place.Node], place.On)
		t.ended[place.Node] = append(t.ended[place.Node], p.UID)
	}
}

// restore undoes evict. It reports whether the candidate's places are still free.
func (t *trial) restore(v int) (fits bool) {
	t.count(v, 1)
	fits = true
	for _, p := range t.need.Victims[v].Pods {
		place := t.cluster.Places[p.UID]
		cards := t.cluster.Cards[place.Node]
		for _, share := range place.On {
			if i, ok := placement.Position(cards, share.Card); ok {
				fits = fits && cards[i].Has(share)
			}
		}
		placement.Use(cards, place.On)
		t.ended[place.Node] = slices.DeleteFunc(t.ended[place.Node], func(uid gpu.PodUID) bool { return uid == p.UID })
		fits = fits && (len(t.placed[place.Node]) == 0 || t.fitsResources(place.Node))
	}
	return fits
}

// count updates what may still be evicted: sign is -1 when the candidate becomes a victim, and 1 when it is restored.
func (t *trial) count(v, sign int) {
	victim := t.need.Victims[v]
	t.lost[victim.Tenant] -= gpu.Memory(sign) * victim.Memory()
	for _, p := range victim.Pods {
		t.gone[p.UID] = sign < 0
		for _, budget := range t.cluster.Budgets[p.UID] {
			t.cluster.Allowed[budget] += sign
		}
	}
}

// placeSomewhere gives the next pod of an item a place on the first node that has room, and reports whether one has.
func (t *trial) placeSomewhere(item int) bool {
	return slices.ContainsFunc(t.next(item).Nodes, func(node string) bool { return t.place(item, node) })
}

// next returns the first pod of an item that has no place.
func (t *trial) next(item int) Pod { return t.need.Items[item].Pods[len(t.places[item])] }

// fitsResources reports whether the node has CPU and all other resources for the pods that have places there, and these.
func (t *trial) fitsResources(node string, pods ...gpu.Pod) bool {
	return t.cluster.FitsResources(node, append(pods, t.placed[node]...), t.ended[node])
}

// place gives the next pod of an item a place on the node, if the node has room.
func (t *trial) place(item int, node string) bool {
	pod := t.next(item).Pod
	where, reason := placement.Place(placement.Expected, t.cluster.Cards[node], pod.Demand())
	if reason != reasons.Fits || !t.fitsResources(node, pod) {
		return false
	}
	t.take(item, Place{node, where})
	return true
}

// take gives the next pod of an item the place.
func (t *trial) take(item int, place Place) {
	placement.Use(t.cluster.Cards[place.Node], place.On)
	t.placed[place.Node] = append(t.placed[place.Node], t.next(item).Pod)
	t.places[item] = append(t.places[item], place)
}

// unplace removes the places of an item's pods, and returns them.
func (t *trial) unplace(item int) []Place {
	former := t.places[item]
	t.places[item] = nil
	for i, place := range former {
		placement.Release(t.cluster.Cards[place.Node], place.On)
		pod := t.need.Items[item].Pods[i].Pod
		t.placed[place.Node] = slices.DeleteFunc(t.placed[place.Node], func(p gpu.Pod) bool { return p.UID == pod.UID })
	}
	return former
}

// dropUnneeded drops each victim without which its item still fits. It tries the victims with the most memory first, and of equal ones the
// oldest.
func (t *trial) dropUnneeded() {
	order := slices.Sorted(maps.Keys(t.itemOf))
	slices.Reverse(order)
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(t.need.Victims[b].Memory(), t.need.Victims[a].Memory()) })
	for _, v := range order {
		item := t.itemOf[v]
		before := t.unplace(item)
		if t.restore(v) && t.placeAll(item) {
			delete(t.itemOf, v)
			continue
		}
		t.unplace(item)
		t.evict(v)
		for _, place := range before {
			t.take(item, place)
		}
	}
}

// placeAll gives each pod of an item a place on the first node that has room, and reports whether all got one.
func (t *trial) placeAll(item int) bool {
	for range t.need.Items[item].Pods {
		if !t.placeSomewhere(item) {
			return false
		}
	}
	return true
}

func (t *trial) plan() (out Plan) {
	awaited := map[string][]gpu.PodUID{}
	for _, v := range slices.Sorted(maps.Keys(t.itemOf)) {
		victim := t.need.Victims[v]
		out.Victims = append(out.Victims, Eviction{victim, t.need.Items[t.itemOf[v]]})
		for _, p := range victim.Pods {
			node := t.cluster.Places[p.UID].Node
			awaited[node] = append(awaited[node], p.UID)
		}
	}
	for i, places := range t.places {
		if places == nil {
			continue
		}
		served := Served{Item: t.need.Items[i], Places: places}
		nodes := map[string]bool{}
		for _, place := range places {
			if !nodes[place.Node] {
				nodes[place.Node] = true
				served.Awaited = append(append(served.Awaited, t.cluster.Leaving[place.Node]...), awaited[place.Node]...)
			}
		}
		out.Served = append(out.Served, served)
	}
	out.Tenants = t.need.Tenants
	return out
}

package reclaim

import (
	"cmp"
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
	before := len(t.evicted)
	for i, pod := range t.need.Items[item].Pods {
		if t.placeSomewhere(item, i) {
			continue
		}
		best := t.cheapest(pod)
		if best != nil {
			for _, v := range best.victims {
				t.evict(v)
				t.itemOf[v] = item
			}
		}
		if best == nil || !t.place(item, i, best.node) {
			t.unplace(item)
			for _, v := range slices.Clone(t.evicted[before:]) {
				t.restore(v)
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
	// memory is the memory of each candidate.
	memory []gpu.Memory
	// gone are the pods of the victims so far. lost is the memory of the victims, by tenant.
	gone map[gpu.PodUID]bool
	lost map[string]gpu.Memory
	// ended are the pods of each node that count as gone: those that are being deleted, and those of the victims. placed are the pods with places.
	ended  map[string][]gpu.PodUID
	placed map[string][]gpu.Pod
	// evicted are the victims so far, in order. itemOf is the item for which each was chosen.
	evicted []int
	itemOf  map[int]int
	// places are the places of each item's pods; nil for an item that has none.
	places [][]Place
	// steps is how many steps all searches together may still take.
	steps int
}

func newTrial(need Need, cluster Cluster) *trial {
	t := &trial{
		need: need, cluster: cluster, on: map[string][]int{},
		memory: make([]gpu.Memory, len(need.Victims)), gone: map[gpu.PodUID]bool{}, lost: map[string]gpu.Memory{},
		itemOf: map[int]int{}, places: make([][]Place, len(need.Items)), steps: maxSteps,
		ended: map[string][]gpu.PodUID{}, placed: map[string][]gpu.Pod{},
	}
	for node, leaving := range cluster.Leaving {
		t.ended[node] = slices.Clone(leaving)
	}
	for i, v := range need.Victims {
		t.memory[i] = v.Memory()
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
	if tenant := t.need.Victims[v].Tenant; t.isGone(v) || t.lost[tenant].Add(t.memory[v]) > t.need.Tenants[tenant].Excess {
		return false
	}
	var uses map[int]int
	for _, p := range t.need.Victims[v].Pods {
		for _, budget := range t.cluster.Budgets[p.UID] {
			if uses == nil {
				uses = map[int]int{}
			}
			uses[budget]++
			if uses[budget] > t.cluster.Allowed[budget] {
				return false
			}
		}
	}
	return true
}

// evict makes the candidate a victim.
func (t *trial) evict(v int) {
	t.evicted = append(t.evicted, v)
	t.count(v, -1)
	for _, p := range t.need.Victims[v].Pods {
		place := t.cluster.Places[p.UID]
		placement.Release(t.cluster.Cards[place.Node], place.On)
		t.ended[place.Node] = append(t.ended[place.Node], p.UID)
	}
}

// restore undoes evict. It reports whether the candidate's places are still free.
func (t *trial) restore(v int) (fits bool) {
	t.evicted = slices.DeleteFunc(t.evicted, func(e int) bool { return e == v })
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
	t.lost[t.need.Victims[v].Tenant] -= gpu.Memory(sign) * t.memory[v]
	for _, p := range t.need.Victims[v].Pods {
		t.gone[p.UID] = sign < 0
		for _, budget := range t.cluster.Budgets[p.UID] {
			t.cluster.Allowed[budget] += sign
		}
	}
}

// placeSomewhere gives a pod of an item a place on the first node that has room, and reports whether one has.
func (t *trial) placeSomewhere(item, i int) bool {
	return slices.ContainsFunc(t.need.Items[item].Pods[i].Nodes, func(node string) bool { return t.place(item, i, node) })
}

// fitsResources reports whether the node has CPU and all other resources for the pods that have places there, and these.
func (t *trial) fitsResources(node string, pods ...gpu.Pod) bool {
	return t.cluster.FitsResources(node, append(pods, t.placed[node]...), t.ended[node])
}

// place gives the pod a place on the node, if the node has room. The pods before it in the item must have their places.
func (t *trial) place(item, i int, node string) bool {
	pod := t.need.Items[item].Pods[i]
	where, reason := placement.Place(placement.Expected, t.cluster.Cards[node], pod.Demand())
	if reason != reasons.Fits || !t.fitsResources(node, pod.Pod) {
		return false
	}
	placement.Use(t.cluster.Cards[node], where)
	t.placed[node] = append(t.placed[node], pod.Pod)
	t.places[item] = append(t.places[item], Place{node, where})
	return true
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

// placeAgain undoes unplace.
func (t *trial) placeAgain(item int, places []Place) {
	t.places[item] = places
	for i, place := range places {
		t.placed[place.Node] = append(t.placed[place.Node], t.need.Items[item].Pods[i].Pod)
		placement.Use(t.cluster.Cards[place.Node], place.On)
	}
}

// dropUnneeded drops each victim without which its item still fits. It tries the victims with the most memory first, and of equal ones the
// oldest.
func (t *trial) dropUnneeded() {
	order := slices.Sorted(slices.Values(t.evicted))
	slices.Reverse(order)
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(t.memory[b], t.memory[a]) })
	for _, v := range order {
		item := t.itemOf[v]
		before := t.unplace(item)
		if t.restore(v) && t.placeAll(item) {
			continue
		}
		t.unplace(item)
		t.evict(v)
		t.placeAgain(item, before)
	}
}

func (t *trial) placeAll(item int) bool {
	for i := range t.need.Items[item].Pods {
		if !t.placeSomewhere(item, i) {
			return false
		}
	}
	return true
}

func (t *trial) plan() (out Plan) {
	awaited := map[string][]gpu.PodUID{}
	for _, v := range slices.Sorted(slices.Values(t.evicted)) {
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

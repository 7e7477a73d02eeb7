package reclaim

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Choose returns the victims whose end makes room for all pods of the need, and the places of these pods. It returns false if it
// finds none.
//
// Each pod that fits nowhere gets the place for which the least memory must be evicted; of equal ones that with the fewest
// victims, and then that whose oldest victim is the newest. At last each victim is dropped without which the pods fit too. So no
// victim is unneeded; the least memory for several pods together is not searched for.
func Choose(need Need, cluster Cluster) (Plan, bool) {
	t := newTrial(need, cluster)
	defer t.undo()
	for i := range need.Pods {
		if t.placeSomewhere(i) {
			continue
		}
		best := t.cheapest(i)
		if best == nil {
			return Plan{}, false
		}
		for _, v := range best.victims {
			t.evict(v)
		}
		if !t.place(i, best.node) {
			return Plan{}, false // Not reached: the search has tried it.
		}
	}
	t.dropUnneeded()
	return t.plan(), true
}

// trial is a change of the cluster that can be undone.
type trial struct {
	need    Need
	cluster Cluster
	// cards are copies of the cluster's, made when a node is first changed or searched.
	cards map[string][]placement.Card
	// on are the positions of the candidates that have a pod on the node, in their order.
	on map[string][]int
	// memory is what each candidate has.
	memory  []gpu.Memory
	excess  map[string]gpu.Memory
	allowed []int
	// evicted are the victims so far, in order.
	evicted []int
	places  []Place
	// steps is how many steps all searches together have left.
	steps int
}

func newTrial(need Need, cluster Cluster) *trial {
	t := &trial{
		need: need, cluster: cluster, cards: map[string][]placement.Card{}, on: map[string][]int{}, memory: make([]gpu.Memory, len(need.Victims)),
		excess: map[string]gpu.Memory{}, allowed: slices.Clone(cluster.Allowed), places: make([]Place, len(need.Pods)), steps: maxSteps,
	}
	for name, standing := range need.Tenants {
		t.excess[name] = standing.Excess
	}
	for i, v := range need.Victims {
		t.memory[i] = v.Memory()
		if slices.ContainsFunc(v.Pods, func(p gpu.Pod) bool { _, known := cluster.Places[p.UID]; return !known }) {
			continue
		}
		for _, p := range v.Pods {
			node := cluster.Places[p.UID].Node
			if on := t.on[node]; len(on) == 0 || on[len(on)-1] != i {
				t.on[node] = append(on, i)
			}
		}
	}
	return t
}

// cardsOf returns the node's cards, which the caller may change.
func (t *trial) cardsOf(node string) []placement.Card {
	cards, copied := t.cards[node]
	if !copied {
		cards = slices.Clone(t.cluster.Cards[node])
		t.cards[node] = cards
	}
	return cards
}

// may reports whether the candidate may be evicted beside the victims so far.
func (t *trial) may(v int) bool {
	if t.memory[v] > t.excess[t.need.Victims[v].Tenant] {
		return false
	}
	uses := map[int]int{}
	for _, p := range t.need.Victims[v].Pods {
		for _, budget := range t.cluster.Budgets[p.UID] {
			if uses[budget]++; uses[budget] > t.allowed[budget] {
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
		change(t.cardsOf(place.Node), place.On, (*placement.Card).Subtract)
		if t.cluster.Capacity != nil {
			t.cluster.Capacity.Evict(place.Node, p.UID)
		}
	}
}

// restore undoes evict.
func (t *trial) restore(v int) {
	t.evicted = slices.DeleteFunc(t.evicted, func(e int) bool { return e == v })
	t.count(v, 1)
	for _, p := range t.need.Victims[v].Pods {
		place := t.cluster.Places[p.UID]
		change(t.cardsOf(place.Node), place.On, (*placement.Card).Add)
		if t.cluster.Capacity != nil {
			t.cluster.Capacity.Restore(place.Node, p.UID)
		}
	}
}

// count adds the candidate to what may still be evicted, times sign.
func (t *trial) count(v, sign int) {
	t.excess[t.need.Victims[v].Tenant] += gpu.Memory(sign) * t.memory[v]
	for _, p := range t.need.Victims[v].Pods {
		for _, budget := range t.cluster.Budgets[p.UID] {
			t.allowed[budget] += sign
		}
	}
}

func change(cards []placement.Card, where gpu.Placement, how func(*placement.Card, gpu.Share)) {
	for _, share := range where {
		if i, ok := slices.BinarySearchFunc(cards, share.Card, func(c placement.Card, index int) int { return c.Index - index }); ok {
			how(&cards[i], share)
		}
	}
}

// placeSomewhere gives the pod a place on the first node that has room, and reports whether one has.
func (t *trial) placeSomewhere(i int) bool {
	return slices.ContainsFunc(t.need.Pods[i].Nodes, func(node string) bool { return t.place(i, node) })
}

// place gives the pod a place on the node, if that has room.
func (t *trial) place(i int, node string) bool {
	cards := t.cluster.Cards[node]
	if changed, copied := t.cards[node]; copied {
		cards = changed
	}
	pod := t.need.Pods[i]
	where, reason := placement.Place(placement.Expected, cards, pod.Demand())
	if reason != placement.Fits || t.cluster.Capacity != nil && !t.cluster.Capacity.Take(node, pod.UID) {
		return false
	}
	change(t.cardsOf(node), where, (*placement.Card).Add)
	t.places[i] = Place{node, where}
	return true
}

// unplace takes the places of all pods.
func (t *trial) unplace() {
	for i, place := range t.places {
		if place.Node == "" {
			continue
		}
		change(t.cardsOf(place.Node), place.On, (*placement.Card).Subtract)
		if t.cluster.Capacity != nil {
			t.cluster.Capacity.Return(place.Node, t.need.Pods[i].UID)
		}
		t.places[i] = Place{}
	}
}

// dropUnneeded drops the victims without which the pods fit too: those with the most memory first, and of equal ones the oldest.
func (t *trial) dropUnneeded() {
	order := slices.Sorted(slices.Values(t.evicted))
	slices.Reverse(order)
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(t.memory[b], t.memory[a]) })
	for _, v := range order {
		before := slices.Clone(t.places)
		t.unplace()
		t.restore(v)
		if t.placeAll() {
			continue
		}
		t.unplace()
		t.evict(v)
		for i, place := range before {
			t.placeAgain(i, place)
		}
	}
}

func (t *trial) placeAll() bool {
	for i := range t.need.Pods {
		if !t.placeSomewhere(i) {
			return false
		}
	}
	return true
}

// placeAgain gives the pod a place that it had.
func (t *trial) placeAgain(i int, place Place) {
	if t.cluster.Capacity != nil {
		t.cluster.Capacity.Take(place.Node, t.need.Pods[i].UID)
	}
	change(t.cardsOf(place.Node), place.On, (*placement.Card).Add)
	t.places[i] = place
}

// undo restores the capacity. The cards are copies.
func (t *trial) undo() {
	t.unplace()
	for _, v := range slices.Clone(t.evicted) {
		t.restore(v)
	}
}

func (t *trial) plan() Plan {
	out := Plan{Places: slices.Clone(t.places)}
	var evicted, missing gpu.Memory
	for _, v := range slices.Sorted(slices.Values(t.evicted)) {
		out.Victims = append(out.Victims, t.need.Victims[v])
		evicted = evicted.Add(t.memory[v])
	}
	wanted := map[string][]placement.Card{} // What the pods get of each card, as Used.
	for _, place := range t.places {
		if wanted[place.Node] == nil {
			cards := slices.Clone(t.cluster.Cards[place.Node])
			for i := range cards {
				cards[i] = cards[i].Empty()
			}
			wanted[place.Node] = cards
		}
		change(wanted[place.Node], place.On, (*placement.Card).Add)
	}
	for node := range maps.Keys(wanted) {
		for i, c := range wanted[node] {
			missing = missing.Add(c.Used.Sub(t.cluster.Cards[node][i].Free()))
		}
	}
	out.Beyond = evicted.Sub(missing)
	return out
}

package ledger

import (
	"container/heap"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// rankings rank nodes for many requests in one step, under the ledger's lock. Requests that are alike share a ranking,
// and the requests can alternate between rankings: each change of a node is recorded, and a ranking applies the changes
// before it is used.
type rankings struct {
	ledger *Ledger
	// view is the one by which nodes are rated; of ReserveAwaited, which rates them in its own way, the zero value.
	view View
	// rate returns how good the node is for the pod, and whether the pod fits the node. It depends only on the node and on what is in the key.
	rate func(n *node, a *asker, kind int) (rate float64, fits bool)
	// placeOn places the pod on the node, which changes the node's revision. It returns false, and changes nothing, if the
	// pod doesn't fit for a reason that rate doesn't know.
	placeOn func(n *node, pod gpu.Pod) bool

	byKey map[rankingKey]*ranking
	// changes are the nodes that changed, in order.
	changes []*node
	// positions holds the positions of the nodes in each list of names that a change made necessary.
	positions map[listKey]map[*node]int
}

// rankingKey is equal for requests that share a ranking.
type rankingKey struct {
	list     listKey
	demand   gpu.Demand
	priority int32
	kind     int
	// own are the pod's own reservations, but for its nomination.
	own ownReservations
}

// listKey identifies a slice of names by its memory, not by its content.
type listKey struct {
	first *string
	len   int
}

func keyOf(names []string) listKey {
	if len(names) == 0 {
		return listKey{}
	}
	return listKey{&names[0], len(names)}
}

// ranking is a heap of the nodes for requests that are alike, the best first.
type ranking struct {
	*rankings
	names []string
	asker asker // One of the pods. Its own nomination counts as used for it too, because the other pods share the ranking.
	kind  int   // That of the key.
	// nodes is the heap. Entries of nodes that have changed since are obsolete.
	nodes []heapEntry
	// refused are the entries of nodes on which a pod could not be placed although it fits their cards. They are tried
	// again only if no other node is left, because another pod can need less of the other resources. If they were tried first, each pod
	// would check each full node.
	refused []heapEntry
	// applied is the number of changes that are applied.
	applied int
}

type heapEntry struct {
	node *node
	rate float64
	// order is the node's position in the list. It breaks ties.
	order int
	// at is the node's revision.
	at uint64
}

func (r heapEntry) obsolete() bool { return r.at != r.node.revision }

// maxRankings bounds the memory for rankings. Only requests that share no list of nodes need so many rankings, and they use each one once.
const maxRankings = 64

// of returns the ranking for the request.
func (r *rankings) of(request *Request) *ranking {
	a := r.ledger.asker(&request.Pod, r.view.Ignored)
	a.own[Nominated] = nil
	key := rankingKey{list: keyOf(request.Nodes), demand: a.demand, priority: a.pod.Priority, own: a.own}
	key.kind, _ = r.ledger.kindOf(&r.view, &request.Pod)
	known := r.byKey[key]
	if known == nil {
		if r.byKey == nil || len(r.byKey) >= maxRankings {
			r.byKey, r.positions = map[rankingKey]*ranking{}, map[listKey]map[*node]int{}
		}
		known = &ranking{rankings: r, names: request.Nodes, asker: a, kind: key.kind}
		known.build()
		r.byKey[key] = known
	}
	return known
}

// build makes the heap.
func (r *ranking) build() {
	r.applied, r.nodes = len(r.changes), make([]heapEntry, 0, len(r.names))
	for i, name := range r.names {
		if n := r.ledger.nodes[name]; n != nil {
			if candidate, fits := r.rated(n, i); fits {
				r.nodes = append(r.nodes, candidate)
			}
		}
	}
	heap.Init(r)
}

// rated returns the node, which is at this position in the list, and whether the request fits it.
func (r *ranking) rated(n *node, order int) (candidate heapEntry, fits bool) {
	rate, fits := r.rate(n, &r.asker, r.kind)
	return heapEntry{n, rate, order, n.revision}, fits
}

// record records that the node's revision has changed.
func (r *rankings) record(n *node) { r.changes = append(r.changes, n) }

// place places the pod on the best node that takes it.
func (r *ranking) place(pod gpu.Pod) (string, bool) {
	r.apply()
	r.refused = slices.DeleteFunc(r.refused, heapEntry.obsolete)
	before := len(r.refused)
	for len(r.nodes) > 0 {
		best := r.nodes[0]
		switch {
		case best.obsolete():
			heap.Pop(r)
		case r.placeOn(best.node, pod):
			r.record(best.node)
			r.applied = len(r.changes)
			if again, fits := r.rated(best.node, best.order); fits {
				r.nodes[0] = again
				heap.Fix(r, 0)
			} else {
				heap.Pop(r)
			}
			return best.node.name, true
		default:
			r.refused = append(r.refused, heap.Pop(r).(heapEntry))
		}
	}
	for _, candidate := range r.refused[:before] {
		if r.placeOn(candidate.node, pod) {
			r.record(candidate.node) // The entry is obsolete now, and the next call of apply adds another one.
			return candidate.node.name, true
		}
	}
	return "", false
}

// apply adds an entry for each node that has changed since the last call. Former entries of these nodes are obsolete.
func (r *ranking) apply() {
	for ; r.applied < len(r.changes); r.applied++ {
		n := r.changes[r.applied]
		i, listed := r.position(n)
		if !listed {
			continue
		}
		if candidate, fits := r.rated(n, i); fits {
			heap.Push(r, candidate)
		}
	}
}

// position returns the node's position in the ranking's list.
func (r *ranking) position(n *node) (int, bool) {
	list := keyOf(r.names)
	positions := r.positions[list]
	if positions == nil {
		positions = make(map[*node]int, len(r.names))
		for i, name := range r.names {
			positions[r.ledger.nodes[name]] = i
		}
		r.positions[list] = positions
	}
	i, listed := positions[n]
	return i, listed
}

// Len implements heap.Interface.
func (r *ranking) Len() int { return len(r.nodes) }

// Less implements heap.Interface.
func (r *ranking) Less(i, j int) bool {
	a, b := &r.nodes[i], &r.nodes[j]
	return a.rate > b.rate || a.rate == b.rate && a.order < b.order
}

// Swap implements heap.Interface.
func (r *ranking) Swap(i, j int) { r.nodes[i], r.nodes[j] = r.nodes[j], r.nodes[i] }

// Push implements heap.Interface.
func (r *ranking) Push(x any) { r.nodes = append(r.nodes, x.(heapEntry)) }

// Pop implements heap.Interface.
func (r *ranking) Pop() any {
	last := r.nodes[len(r.nodes)-1]
	r.nodes = r.nodes[:len(r.nodes)-1]
	return last
}

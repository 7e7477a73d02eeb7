package ledger

import (
	"container/heap"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Request is a pod to place on one of several nodes.
type Request struct {
	Pod gpu.Pod
	// Nodes are the names of the candidate nodes. Consecutive requests that share one slice are placed faster.
	Nodes []string
}

// Reservation is the node that a request got.
type Reservation struct {
	Node string
	// Existing is true if the pod had its allocation on this node before.
	Existing bool
}

// Capacity counts what nodes have besides GPU memory: CPU, memory, pods, extended resources. The ledger uses it with its
// lock held, so it must not call the ledger. Where a Capacity is a parameter, nil means that everything else fits.
type Capacity interface {
	// Take reports whether the pod fits the node, and if so counts the pod there.
	Take(node string, uid gpu.PodUID) bool
	// Return undoes Take.
	Return(node string, uid gpu.PodUID)
}

// ReserveAll adds an assumed allocation for every one of the requests, or for none, in one step. A pod that has an
// allocation keeps it; that must be on one of its candidate nodes.
//
// If there is not enough room, the assumed allocations of the pods in yielding are released, set by set in order, until
// there is: no more sets than needed, and none if all of them don't suffice. It returns the places in the order of the
// requests, nil if there is no room, and the number of released sets.
func (l *Ledger) ReserveAll(requests []Request, yielding [][]gpu.PodUID, view View, _ Capacity, at time.Time) (places []Reservation, yielded int) {
	l.try(view, at, func(t *trial) bool {
		for places = t.placeAll(requests); places == nil && yielded < len(yielding); places = t.placeAll(requests) {
			t.release(yielding[yielded])
			yielded++
		}
		return places != nil
	})
	if places == nil {
		return nil, 0
	}
	return places, yielded
}

// Move replaces the pod's assumed allocation by one on one of the candidate nodes. If the pod fits none of them it keeps
// what it has.
func (l *Ledger) Move(request Request, view View, _ Capacity, at time.Time) (node string, ok bool) {
	l.try(view, at, func(t *trial) bool {
		t.release([]gpu.PodUID{request.Pod.UID})
		if places := t.placeAll([]Request{request}); places != nil {
			node, ok = places[0].Node, true
		}
		return ok
	})
	return node, ok
}

// trial is a change of several nodes that can be undone. The ledger's lock is held throughout.
type trial struct {
	*Ledger
	view View
	at   time.Time
	// placed counts new allocations. It makes their assume times differ, because device plugins order pods by them.
	placed int
	// released are the released allocations.
	released map[gpu.PodUID]releasedAllocation
	// before is the room that the nodes of released allocations had before.
	before map[string][]placement.Card
}

type releasedAllocation struct {
	node       string
	allocation *Allocation
}

// try runs what under the lock, and restores the released allocations if it returns false. Otherwise it calls freed, without
// the lock, for each node on which memory became free.
func (l *Ledger) try(view View, at time.Time, what func(t *trial) bool) {
	for _, name := range l.tryLocked(view, at, what) {
		l.freed(name)
	}
}

func (l *Ledger) tryLocked(view View, at time.Time, what func(t *trial) bool) (roomier []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t := &trial{Ledger: l, view: view, at: at, released: map[gpu.PodUID]releasedAllocation{}, before: map[string][]placement.Card{}}
	if !what(t) {
		t.undo()
		return nil
	}
	return t.roomier()
}

// release releases assumed allocations. Bound ones stay.
func (t *trial) release(uids []gpu.PodUID) {
	for _, uid := range uids {
		a := t.allocation(uid)
		if a == nil || a.State != Assumed {
			continue
		}
		name := t.nodeOf[uid]
		n := t.nodes[name]
		if _, touched := t.before[name]; !touched {
			t.before[name] = n.room()
		}
		t.released[uid] = releasedAllocation{name, a}
		t.unplace(uid)
	}
}

// undo restores the released allocations.
func (t *trial) undo() {
	for uid, what := range t.released {
		n := t.nodes[what.node]
		n.allocations[uid] = what.allocation
		t.nodeOf[uid] = what.node
		n.recount()
		t.markChanged(n)
	}
}

// roomier returns the nodes that have more room than before.
func (t *trial) roomier() (names []string) {
	for name, before := range t.before {
		n := t.nodes[name]
		if n.roomierThan(before) {
			names = append(names, name)
		}
		if t.dropUnused(name, n) {
			t.forgotten = t.revision
		}
	}
	return slices.Sorted(slices.Values(names))
}

func (t *trial) unplace(uid gpu.PodUID) {
	n := t.nodes[t.nodeOf[uid]]
	delete(n.allocations, uid)
	delete(t.nodeOf, uid)
	n.recount()
	t.markChanged(n)
}

// placeAll adds allocations for all requests. If one doesn't fit it adds none and returns nil.
func (t *trial) placeAll(requests []Request) []Reservation {
	places := make([]Reservation, 0, len(requests))
	var added []gpu.PodUID
	var choice *nodeHeap
	for i := range requests {
		request := &requests[i]
		if home, allocated := t.nodeOf[request.Pod.UID]; allocated {
			if !slices.Contains(request.Nodes, home) {
				break
			}
			places = append(places, Reservation{Node: home, Existing: true})
			continue
		}
		if choice == nil || !choice.appliesTo(request) {
			choice = t.rankFor(request)
		}
		node, ok := choice.place(request.Pod)
		if !ok {
			break
		}
		places, added = append(places, Reservation{Node: node}), append(added, request.Pod.UID)
	}
	if len(places) == len(requests) {
		return places
	}
	for _, uid := range added {
		t.unplace(uid)
	}
	return nil
}

// nodeHeap is a heap of the nodes for pods with the same request, the best first.
type nodeHeap struct {
	*trial
	like  *Request
	nodes []ranked
}

type ranked struct {
	name  string
	suits placement.Suitability
	// order is the node's position in the list. It breaks ties.
	order int
}

func (t *trial) rankFor(request *Request) *nodeHeap {
	c := &nodeHeap{trial: t, like: request}
	for i, name := range request.Nodes {
		if suits, reason := t.suit(t.nodes[name], t.view, request.Pod); reason == placement.Fits {
			c.nodes = append(c.nodes, ranked{name, suits, i})
		}
	}
	heap.Init(c)
	return c
}

// appliesTo reports whether the ranking applies to this request too.
func (c *nodeHeap) appliesTo(request *Request) bool {
	return request.Pod.Request == c.like.Pod.Request && request.Pod.Priority == c.like.Pod.Priority && sameList(request.Nodes, c.like.Nodes)
}

// sameList reports whether both are the same slice, not whether they are equal.
func sameList(a, b []string) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// place adds an allocation on the best node, and ranks that node again.
func (c *nodeHeap) place(pod gpu.Pod) (string, bool) {
	for len(c.nodes) > 0 {
		best := &c.nodes[0]
		n := c.Ledger.nodes[best.name]
		where, reason := placement.Place(c.view.Card, c.cardsFor(n, pod), pod.Request)
		if reason != placement.Fits {
			heap.Pop(c)
			continue
		}
		name := best.name
		c.assume(name, pod, where, c.at.Add(time.Duration(c.placed)))
		c.placed++
		if suits, reason := c.suit(n, c.view, pod); reason == placement.Fits {
			best.suits = suits
			heap.Fix(c, 0)
		} else {
			heap.Pop(c)
		}
		return name, true
	}
	return "", false
}

// Len implements heap.Interface.
func (c *nodeHeap) Len() int { return len(c.nodes) }

// Less implements heap.Interface.
func (c *nodeHeap) Less(i, j int) bool {
	a, b := &c.nodes[i], &c.nodes[j]
	return a.suits > b.suits || a.suits == b.suits && a.order < b.order
}

// Swap implements heap.Interface.
func (c *nodeHeap) Swap(i, j int) { c.nodes[i], c.nodes[j] = c.nodes[j], c.nodes[i] }

// Push implements heap.Interface; nothing is ever pushed.
func (c *nodeHeap) Push(x any) { c.nodes = append(c.nodes, x.(ranked)) }

// Pop implements heap.Interface.
func (c *nodeHeap) Pop() any {
	last := c.nodes[len(c.nodes)-1]
	c.nodes = c.nodes[:len(c.nodes)-1]
	return last
}

// StillUsable reports whether the pod's allocation is still usable: all its cards are healthy, and the node shares them.
func (l *Ledger) StillUsable(uid gpu.PodUID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	a := l.allocation(uid)
	if a == nil {
		return false
	}
	n := l.nodes[l.nodeOf[uid]]
	if n.shareable() != placement.Fits || len(a.Placement) == 0 {
		return false
	}
	for _, share := range a.Placement {
		if i, ok := n.position(share.Card); !ok || n.cards[i].Unhealthy {
			return false
		}
	}
	return true
}

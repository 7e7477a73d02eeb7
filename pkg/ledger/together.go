package ledger

import (
	"container/heap"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Want is a pod to place on one of several nodes.
type Want struct {
	Pod gpu.Pod
	// Nodes are the names of the candidate nodes. Consecutive wants that share one slice are placed faster.
	Nodes []string
}

// Place is the node that a Want got.
type Place struct {
	Node string
	// Kept is true if the pod had its allocation on this node before.
	Kept bool
}

// ReserveTogether adds an assumed allocation for every one of the wants, or for none, in one step. A pod that has an
// allocation keeps it; that must be on one of its candidate nodes.
//
// If there is not enough room, the assumed allocations of the pods in yielding are released, set by set in order, until
// there is: no more sets than needed, and none if all of them don't suffice. It returns the places in the order of the
// wants, nil if there is no room, and the number of released sets.
func (l *Ledger) ReserveTogether(wants []Want, yielding [][]gpu.PodUID, view View, at time.Time) (places []Place, yielded int) {
	var roomier []string
	func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		t := l.try(view, at)
		for {
			if places = t.placeAll(wants); places != nil || yielded == len(yielding) {
				break
			}
			t.lift(yielding[yielded])
			yielded++
		}
		if places == nil {
			t.undo()
			yielded = 0
			return
		}
		roomier = t.roomier()
	}()
	for _, name := range roomier {
		l.freed(name)
	}
	return places, yielded
}

// Move replaces the pod's assumed allocation by one on one of the candidate nodes. If the pod fits none of them it keeps
// what it has.
func (l *Ledger) Move(want Want, view View, at time.Time) (node string, ok bool) {
	var roomier []string
	func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		t := l.try(view, at)
		t.lift([]gpu.PodUID{want.Pod.UID})
		places := t.placeAll([]Want{want})
		if places == nil {
			t.undo()
			return
		}
		node, ok = places[0].Node, true
		roomier = t.roomier()
	}()
	for _, name := range roomier {
		l.freed(name)
	}
	return node, ok
}

// trial is a change of several nodes that can be undone. The ledger's lock is held throughout.
type trial struct {
	*Ledger
	view View
	at   time.Time
	// placed counts new allocations. It makes their assume times differ, because device plugins order pods by them.
	placed int
	// lifted are the released allocations.
	lifted map[gpu.PodUID]lifted
	// before is the room that the nodes of released allocations had before.
	before map[string][]placement.Card
}

type lifted struct {
	node   string
	holder *Holder
}

func (l *Ledger) try(view View, at time.Time) *trial {
	return &trial{Ledger: l, view: view, at: at, lifted: map[gpu.PodUID]lifted{}, before: map[string][]placement.Card{}}
}

// lift releases assumed allocations. Bound ones stay.
func (t *trial) lift(uids []gpu.PodUID) {
	for _, uid := range uids {
		h := t.holder(uid)
		if h == nil || h.State != Reserved {
			continue
		}
		name := t.homes[uid]
		n := t.nodes[name]
		if _, touched := t.before[name]; !touched {
			t.before[name] = n.room()
		}
		t.lifted[uid] = lifted{name, h}
		t.remove(uid)
	}
}

// undo restores the released allocations.
func (t *trial) undo() {
	for uid, what := range t.lifted {
		n := t.nodes[what.node]
		n.holders[uid] = what.holder
		t.homes[uid] = what.node
		n.recount()
		t.touch(n)
	}
}

// roomier returns the nodes that have more room than before.
func (t *trial) roomier() (names []string) {
	for name, before := range t.before {
		n := t.nodes[name]
		if n.roomierThan(before) {
			names = append(names, name)
		}
		if !n.known && len(n.holders) == 0 && len(n.nominees) == 0 {
			delete(t.nodes, name)
			t.membership++
			t.forgotten = t.revision
		}
	}
	return slices.Sorted(slices.Values(names))
}

func (t *trial) remove(uid gpu.PodUID) {
	n := t.nodes[t.homes[uid]]
	delete(n.holders, uid)
	delete(t.homes, uid)
	n.recount()
	t.touch(n)
}

// placeAll adds allocations for all wants. If one doesn't fit it adds none and returns nil.
func (t *trial) placeAll(wants []Want) []Place {
	places := make([]Place, 0, len(wants))
	var added []gpu.PodUID
	var choice *choice
	for i := range wants {
		want := &wants[i]
		if home, held := t.homes[want.Pod.UID]; held {
			if !slices.Contains(want.Nodes, home) {
				break
			}
			places = append(places, Place{Node: home, Kept: true})
			continue
		}
		if choice == nil || !choice.serves(want) {
			choice = t.choose(want)
		}
		node, ok := choice.place(want.Pod)
		if !ok {
			break
		}
		places, added = append(places, Place{Node: node}), append(added, want.Pod.UID)
	}
	if len(places) == len(wants) {
		return places
	}
	for _, uid := range added {
		t.remove(uid)
	}
	return nil
}

// choice is a heap of the nodes for pods with the same request, the best first.
type choice struct {
	*trial
	like  *Want
	nodes []ranked
}

type ranked struct {
	name  string
	suits placement.Suitability
	// order is the node's position in the list. It breaks ties.
	order int
}

func (t *trial) choose(want *Want) *choice {
	c := &choice{trial: t, like: want}
	for i, name := range want.Nodes {
		if suits, reason := t.suit(t.nodes[name], t.view, want.Pod); reason == placement.Fits {
			c.nodes = append(c.nodes, ranked{name, suits, i})
		}
	}
	heap.Init(c)
	return c
}

// serves reports whether the ranking applies to this want too.
func (c *choice) serves(want *Want) bool {
	return want.Pod.Request == c.like.Pod.Request && want.Pod.Priority == c.like.Pod.Priority && sameList(want.Nodes, c.like.Nodes)
}

// sameList reports whether both are the same slice, not whether they are equal.
func sameList(a, b []string) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// place adds an allocation on the best node, and ranks that node again.
func (c *choice) place(pod gpu.Pod) (string, bool) {
	for len(c.nodes) > 0 {
		best := &c.nodes[0]
		n := c.Ledger.nodes[best.name]
		where, reason := placement.Place(c.view.Card, c.cardsFor(n, pod), pod.Request)
		if reason != placement.Fits {
			heap.Pop(c)
			continue
		}
		n.holders[pod.UID] = &Holder{Pod: pod, State: Reserved, Placement: where, AssumeTime: c.at.Add(time.Duration(c.placed))}
		c.placed++
		c.homes[pod.UID] = best.name
		c.touch(n)
		n.take(where)
		name := best.name
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
func (c *choice) Len() int { return len(c.nodes) }

// Less implements heap.Interface.
func (c *choice) Less(i, j int) bool {
	a, b := &c.nodes[i], &c.nodes[j]
	return a.suits > b.suits || a.suits == b.suits && a.order < b.order
}

// Swap implements heap.Interface.
func (c *choice) Swap(i, j int) { c.nodes[i], c.nodes[j] = c.nodes[j], c.nodes[i] }

// Push implements heap.Interface; nothing is ever pushed.
func (c *choice) Push(x any) { c.nodes = append(c.nodes, x.(ranked)) }

// Pop implements heap.Interface.
func (c *choice) Pop() any {
	last := c.nodes[len(c.nodes)-1]
	c.nodes = c.nodes[:len(c.nodes)-1]
	return last
}

// Stands reports whether the pod's allocation is still usable: all its cards are healthy, and the node shares them.
func (l *Ledger) Stands(uid gpu.PodUID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	h := l.holder(uid)
	if h == nil {
		return false
	}
	n := l.nodes[l.homes[uid]]
	if n.open() != placement.Fits || len(h.Placement) == 0 {
		return false
	}
	for _, share := range h.Placement {
		if i, ok := n.position(share.Card); !ok || n.cards[i].Unhealthy {
			return false
		}
	}
	return true
}

package ledger

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Request is a pod to place on one of several nodes.
type Request struct {
	Pod gpu.Pod
	// Nodes are the names of the candidate nodes. Nodes are ranked once for each slice, amount and priority, so
	// requests with equal candidates should share one slice.
	Nodes []string
	// Binding is true if the pod's bind makes the request.
	Binding bool
}

// ChosenNode is the node that a request got.
type ChosenNode struct {
	Node string
	// Existing is true if the pod had its allocation on this node before.
	Existing bool
}

// Reserve chooses cards of the node for the pod and adds an assumed allocation, in one step. If the pod already has an
// allocation on this node, Reserve returns that one unchanged, so that retries are safe; a presumed one may have no
// placement. The error is a *NoRoomError if the pod doesn't fit.
func (l *Ledger) Reserve(name string, pod gpu.Pod, policy placement.Policy, at time.Time) (allocation Allocation, err error) {
	l.edit(func(e *edit) {
		l.endTentative(pod.UID)
		if home, allocated := l.nodeOf[pod.UID]; allocated {
			if home != name {
				err = &NoRoomError{name, reasons.Elsewhere}
				return
			}
			allocation = l.allocation(pod.UID).copy()
			return
		}
		n, a := l.nodes[name], l.asker(&pod, nil)
		where, reason := l.chooseCards(n, &a, policy)
		if reason != reasons.Fits {
			err = &NoRoomError{name, reason}
			return
		}
		allocation = e.assume(name, pod, where, at).copy()
	})
	return allocation, err
}

// ReserveAll adds an assumed allocation for each of the requests, or for none, in one step. A pod that has an allocation keeps it; this
// allocation must be on one of its candidate nodes. Each other pod gets the best node by the view that has CPU and all other resources too. Nodes
// that lacked these for an earlier request with the same candidates are tried last.
//
// If there is not enough room, ReserveAll releases the assumed allocations of the pods in yielding, one set after another, until there is. Pods
// whose bind has begun keep theirs.
// It releases as few sets as needed, and none if all of them together aren't enough. It returns the places in the order of the requests (nil
// if there is no room) and the number of released sets.
func (l *Ledger) ReserveAll(requests []Request, yielding [][]gpu.PodUID, view View, at time.Time) (places []ChosenNode, yielded int) {
	l.try(view, at, func(t *trial) bool {
		for places = t.placeAll(requests); places == nil && yielded < len(yielding); places = t.placeAll(requests) {
			t.release(slices.DeleteFunc(slices.Clone(yielding[yielded]), l.isBinding)...)
			yielded++
		}
		return places != nil
	})
	if places == nil {
		return nil, 0
	}
	return places, yielded
}

// Move replaces the pod's assumed allocation by one on one of the candidate nodes. If the pod fits none of them, or a bind of the pod has begun
// that doesn't make the request, it keeps its allocation.
func (l *Ledger) Move(request Request, view View, at time.Time) (node string, ok bool) {
	l.try(view, at, func(t *trial) bool {
		if l.isBinding(request.Pod.UID) && !request.Binding {
			return false
		}
		t.release(request.Pod.UID)
		if places := t.placeAll([]Request{request}); places != nil {
			node, ok = places[0].Node, true
		}
		return ok
	})
	return node, ok
}

// FitsWithoutAssumed reports whether the cards of one of the nodes would have room for the pod if there were no assumed allocations. If not,
// ReserveAll can't place the pod on these nodes, whatever yields. This check is cheaper than ReserveAll, which releases and restores
// allocations one by one.
func (l *Ledger) FitsWithoutAssumed(pod gpu.Pod, names []string) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	demand := pod.Demand()
	return slices.ContainsFunc(names, func(name string) bool {
		n := l.nodes[name]
		if n.accepts(&demand) != reasons.Fits {
			return false
		}
		cards := n.spec.empty()
		for _, a := range n.allocations {
			if a.State != Assumed {
				placement.Use(cards, a.Placement)
			}
		}
		return placement.Fit(cards, demand) == reasons.Fits
	})
}

// StillUsable reports whether the pod can still be bound with its allocation: the node shares its cards, and the cards
// of the allocation exist, are healthy, near an adapter if they must be, and have no more allocated than they have. A card can have more allocated
// if another scheduler bound a pod there, or if the card became smaller.
func (l *Ledger) StillUsable(uid gpu.PodUID) bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	a := l.allocation(uid)
	if a == nil {
		return false
	}
	demand := a.Demand()
	usable := func(card *placement.Card, _ gpu.Share) bool { return !card.Overfull() }
	return len(a.Placement) > 0 && l.nodes[l.nodeOf[uid]].canUse(a.Placement, &demand, usable)
}

// canUse reports whether the node accepts the demand, and its cards of the placement exist, are healthy, near an adapter if they must be, and usable. n
// may be nil.
func (n *node) canUse(where gpu.Placement, demand *gpu.Demand, usable func(*placement.Card, gpu.Share) bool) bool {
	return n.accepts(demand) == reasons.Fits && !slices.ContainsFunc(where, func(share gpu.Share) bool {
		i, ok := placement.Position(n.cards, share.Card)
		return !ok || n.cards[i].Unhealthy || n.cards[i].Lacks(demand) || !usable(&n.cards[i], share)
	})
}

// trial is a change of several nodes that can be undone. The ledger's lock is held throughout.
type trial struct {
	*edit
	at time.Time
	// placed counts new allocations. It makes their assume times differ, because device plugins order pods by them.
	placed int
	ranks  rankings
	// released are the released allocations.
	released map[gpu.PodUID]releasedAllocation
}

type releasedAllocation struct {
	node       string
	allocation *Allocation
}

// try restores the released allocations if what returns false. Otherwise it calls the freed listeners for each node on which memory became free.
func (l *Ledger) try(view View, at time.Time, what func(t *trial) bool) {
	l.edit(func(e *edit) {
		t := &trial{edit: e, at: at, released: map[gpu.PodUID]releasedAllocation{}}
		t.ranks = l.rankingsBy(view, t.placeOn)
		if !what(t) {
			t.undo()
			return
		}
		for uid := range t.released {
			if !t.allocated(uid) {
				t.endPlaced(uid)
			}
		}
	})
}

// release releases assumed allocations. Bound ones stay.
func (t *trial) release(uids ...gpu.PodUID) {
	for _, uid := range uids {
		if a := t.allocation(uid); a != nil && a.State == Assumed {
			t.released[uid] = releasedAllocation{t.nodeOf[uid], a}
			t.unplace(uid)
		}
	}
}

// undo restores the released allocations.
func (t *trial) undo() {
	for uid, what := range t.released {
		t.alter(what.node, func(n *node) { n.allocations[uid] = what.allocation })
		t.nodeOf[uid] = what.node
	}
	t.freed = nil
}

// unplace removes the pod's allocation.
func (t *trial) unplace(uid gpu.PodUID) { t.ranks.record(t.edit.unplace(uid)) }

// placeAll adds allocations for all requests. If one doesn't fit it adds none and returns nil.
func (t *trial) placeAll(requests []Request) []ChosenNode {
	places := make([]ChosenNode, 0, len(requests))
	var added []gpu.PodUID
	for i := range requests {
		request := &requests[i]
		if home, allocated := t.nodeOf[request.Pod.UID]; allocated {
			if !slices.Contains(request.Nodes, home) {
				break
			}
			places = append(places, ChosenNode{Node: home, Existing: true})
			continue
		}
		node, ok := t.placeNominated(request)
		if !ok {
			node, ok = t.ranks.of(&requests[i]).place(request.Pod)
		}
		if !ok {
			break
		}
		places, added = append(places, ChosenNode{Node: node}), append(added, request.Pod.UID)
	}
	if len(places) == len(requests) {
		return places
	}
	for _, uid := range added {
		t.unplace(uid)
		if _, released := t.released[uid]; !released {
			t.endPlaced(uid)
		}
	}
	return nil
}

// placeNominated places the pod on the node to which it is nominated, if this node is a candidate and has room. All other pods see the
// nomination as used memory, so a ranking that the pod places with other pods may not contain the node.
func (t *trial) placeNominated(request *Request) (name string, ok bool) {
	nomination := t.reservations.awaited[Nominated][request.Pod.UID]
	if nomination == nil {
		return "", false
	}
	name = nomination.Places[0].Node
	n := t.nodes[name]
	if n == nil || !slices.Contains(request.Nodes, name) {
		return "", false
	}
	defer t.ranks.record(n) // The nomination doesn't count any more, wherever the pod is placed.
	a := t.asker(&request.Pod, t.ranks.view.Ignored)
	if placement.Fit(t.cardsInView(n, &t.ranks.view, &a), a.demand) != reasons.Fits || !t.placeOn(n, request.Pod) {
		return "", false
	}
	return name, true
}

// placeOn adds an allocation for the pod on the node. It returns false if the pod doesn't fit.
func (t *trial) placeOn(n *node, pod gpu.Pod) bool {
	where, fits := t.choosePlace(n, &pod, &t.ranks.view)
	if !fits {
		return false
	}
	t.assume(n.name, pod, where, t.at.Add(time.Duration(t.placed)))
	t.placed++
	return true
}

// choosePlace returns the cards of the node that the view's policy chooses for the pod; false if the pod doesn't fit. Unlike chooseCards it is also
// for nodes that kube-scheduler has not offered.
func (l *Ledger) choosePlace(n *node, pod *gpu.Pod, view *View) (where gpu.Placement, fits bool) {
	a := l.asker(pod, view.Ignored)
	where, reason := l.chooseCards(n, &a, view.Card)
	return where, reason == reasons.Fits && l.hasResourcesNow(n, &a)
}

// rankingsBy returns rankings by the view. placeOn is rankings.placeOn.
func (l *Ledger) rankingsBy(view View, placeOn func(n *node, pod gpu.Pod) bool) rankings {
	return rankings{
		ledger: l, view: view, placeOn: placeOn, rate: func(n *node, a *asker, kind int) (float64, bool) {
			suits, reason := l.suitability(n, &view, a, kind)
			return float64(suits), reason == reasons.Fits
		},
	}
}

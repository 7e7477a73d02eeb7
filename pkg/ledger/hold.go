package ledger

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// hold holds memory on certain cards for pods, while other pods are evicted from these cards. Other pods see this memory as used.
type hold struct {
	nodes map[string][]HeldPlace
	// unitOf holds the unit of each pod.
	unitOf map[gpu.PodUID]int
	// priority is the highest priority of the pods for which the hold counts.
	priority int32
}

// HeldPlace is a place that is held for a pod.
type HeldPlace struct {
	UID  gpu.PodUID
	Node string
	On   gpu.Placement
	// Unit is positive, and equal for pods that get their places together. A pod sees the places of other units as used.
	Unit int
}

func (h HeldPlace) equal(o HeldPlace) bool {
	return h.UID == o.UID && h.Unit == o.Unit && h.On.Equal(o.On)
}

// Hold replaces the held places. Their cards may still be in use, and become available when pods end. Other pods whose priority is not higher
// than priority see the places as used. A pod's held place counts until the pod has an allocation.
func (l *Ledger) Hold(places []HeldPlace, priority int32) {
	l.mu.Lock()
	freed := l.hold(places, priority)
	l.mu.Unlock()
	l.freed(freed...) // Other pods can use memory that isn't held any more.
}

func (l *Ledger) hold(places []HeldPlace, priority int32) (freed []string) {
	former, formerPriority, next := l.held.nodes, l.held.priority, map[string][]HeldPlace{}
	l.held = hold{nodes: next, unitOf: map[gpu.PodUID]int{}, priority: priority}
	for _, place := range places {
		l.held.unitOf[place.UID] = place.Unit
		next[place.Node] = append(next[place.Node], place)
	}
	for name, held := range former {
		n := l.nodes[name]
		if n == nil {
			continue
		}
		changed := !slices.EqualFunc(held, next[name], HeldPlace.equal)
		if changed {
			n.held = nil
			l.markChanged(n)
		}
		if changed || priority < formerPriority {
			freed = append(freed, name)
		}
	}
	for name, held := range next {
		if n := l.nodes[name]; n != nil && !slices.EqualFunc(held, n.held, HeldPlace.equal) {
			n.held = held
			l.markChanged(n)
		}
	}
	slices.Sort(freed)
	return freed
}

// reservedFor returns the nodes of the pod's nomination and held places, which don't count any more once the pod has an allocation. The
// caller holds the lock.
func (l *Ledger) reservedFor(uid gpu.PodUID) (names []string) {
	if name, nominated := l.nominations[uid]; nominated {
		names = append(names, name)
	}
	if _, held := l.held.unitOf[uid]; !held {
		return names
	}
	for name, places := range l.held.nodes {
		if slices.ContainsFunc(places, func(p HeldPlace) bool { return p.UID == uid }) {
			names = append(names, name)
		}
	}
	return names
}

// withHold returns the node's cards with the held places counted as used, and whether that is a copy. The caller holds the lock.
func (l *Ledger) withHold(n *node, pod *gpu.Pod) (cards []placement.Card, copied bool) {
	if len(n.held) == 0 || pod.Priority > l.held.priority {
		return n.cards, false
	}
	cards = slices.Clone(n.cards)
	for _, place := range n.held {
		if _, allocated := l.nodeOf[place.UID]; !allocated && place.Unit != l.held.unitOf[pod.UID] {
			add(cards, place.On)
		}
	}
	return cards, true
}

package ledger

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// starvationReservation is memory on certain cards that is held back for certain pods. Running pods on these cards go on.
// Other pods of equal or lower priority see the reserved memory as used. There is at most one at a time.
type starvationReservation struct {
	pods     map[gpu.PodUID]struct{}
	priority int32
	nodes    []string
}

// ReserveForStarving reserves memory for all requests, each on the card with the most free memory, until
// EndStarvationReservation. The memory may still be in use: it becomes available as pods end. It reserves nothing and returns
// false if the requests don't fit even on empty cards.
func (l *Ledger) ReserveForStarving(requests []Request, priority int32, _ string, _ Capacity) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endStarvationReservation()
	l.starvation = &starvationReservation{pods: map[gpu.PodUID]struct{}{}, priority: priority}
	for _, request := range requests {
		if _, allocated := l.nodeOf[request.Pod.UID]; allocated {
			continue
		}
		name, card, ok := l.emptiest(request)
		if !ok {
			l.endStarvationReservation()
			return false
		}
		n := l.nodes[name]
		n.starvation = append(n.starvation, gpu.Share{Card: card, Memory: request.Pod.Request})
		l.starvation.pods[request.Pod.UID] = struct{}{}
		l.starvation.nodes = append(l.starvation.nodes, name)
	}
	return true
}

// EndStarvationReservation ends the starvation reservation, if there is one.
func (l *Ledger) EndStarvationReservation() {
	l.mu.Lock()
	nodes := l.endStarvationReservation()
	l.mu.Unlock()
	for _, name := range nodes {
		l.freed(name) // Other pods can use the memory now.
	}
}

func (l *Ledger) endStarvationReservation() (nodes []string) {
	if l.starvation == nil {
		return nil
	}
	nodes = slices.Compact(slices.Sorted(slices.Values(l.starvation.nodes)))
	for _, name := range nodes {
		if n := l.nodes[name]; n != nil {
			n.starvation = nil
		}
	}
	l.starvation = nil
	return nodes
}

// emptiest returns the card with the most free memory among those that could hold the request if they were empty.
func (l *Ledger) emptiest(request Request) (node string, card int, ok bool) {
	var most gpu.Memory
	for _, name := range request.Nodes {
		n := l.nodes[name]
		if n.shareable() != placement.Fits {
			continue
		}
		for i := range n.cards {
			c := &n.cards[i]
			var reserved gpu.Memory
			for _, share := range n.starvation {
				if share.Card == c.Index {
					reserved = reserved.Add(share.Memory)
				}
			}
			if c.Unhealthy || c.Memory.Sub(reserved) < request.Pod.Request {
				continue
			}
			if free := c.Free().Sub(reserved); !ok || free > most {
				node, card, most, ok = name, c.Index, free, true
			}
		}
	}
	return node, card, ok
}

// seesStarvationReservation reports whether the starvation reservation on the node counts as used for the pod.
func (l *Ledger) seesStarvationReservation(n *node, pod gpu.Pod) bool {
	if len(n.starvation) == 0 || pod.Priority > l.starvation.priority {
		return false
	}
	_, mine := l.starvation.pods[pod.UID]
	return !mine
}

// StarvationIdle returns the memory that the starvation reservation keeps from other pods now.
func (l *Ledger) StarvationIdle() gpu.Memory { return 0 }

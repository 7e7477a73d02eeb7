package ledger

import (
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// starvationReservation is memory on certain cards that is held back for certain pods. Running pods on these cards go on.
// Other pods of equal or lower priority see the reserved memory as used. There is at most one at a time.
type starvationReservation struct {
	// pods maps each pod to the node on which memory is reserved for it.
	pods     map[gpu.PodUID]string
	priority int32
	label    string
}

// ReserveForStarving reserves memory for all requests, each on the card with the most free memory, until
// EndStarvationReservation. The memory may still be in use: it becomes available as pods end. It reserves nothing and
// returns false if the requests don't fit even on empty cards, or don't fit by capacity. The pods are counted in capacity
// if all fit. label names the pods for users.
func (l *Ledger) ReserveForStarving(requests []Request, priority int32, label string, capacity Capacity) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.endStarvationReservation()
	made := &starvationReservation{pods: map[gpu.PodUID]string{}, priority: priority, label: label}
	l.starvation = made
	ranks := rankings{ledger: l, rate: rateEmptiest, put: func(name string, n *node, pod gpu.Pod) bool {
		if capacity != nil && !capacity.Take(name, pod.UID) {
			return false
		}
		card, _, _ := n.emptiest(pod.Request)
		n.starvation = append(n.starvation, gpu.Share{Card: card, Memory: pod.Request})
		made.pods[pod.UID] = name
		l.markChanged(n)
		return true
	}}
	for i := range requests {
		request := &requests[i]
		if _, allocated := l.nodeOf[request.Pod.UID]; allocated {
			continue
		}
		if _, ok := ranks.of(request).place(request.Pod); !ok {
			l.endStarvationReservation()
			made.returnTo(capacity)
			return false
		}
	}
	return true
}

// nodes returns the names of the nodes, sorted. Those that have been deleted since are among them.
func (s *starvationReservation) nodes() []string {
	return slices.Compact(slices.Sorted(maps.Values(s.pods)))
}

// returnTo returns what the pods took of the capacity, which can be nil.
func (s *starvationReservation) returnTo(capacity Capacity) {
	if capacity == nil {
		return
	}
	for uid, node := range s.pods {
		capacity.Return(node, uid)
	}
}

// StarvationLabel returns the label of the starvation reservation; empty if there is none.
func (l *Ledger) StarvationLabel() string {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.starvation == nil {
		return ""
	}
	return l.starvation.label
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
	nodes = l.starvation.nodes()
	for _, name := range nodes {
		if n := l.nodes[name]; n != nil {
			n.starvation = nil
		}
	}
	l.starvation = nil
	return nodes
}

func rateEmptiest(n *node, request *Request) (rate float64, fits bool) {
	_, free, fits := n.emptiest(request.Pod.Request)
	return float64(free), fits
}

// emptiest returns the card with the most free memory among those that could hold the request if they were empty, and how
// much it has free beside the starvation reservation.
func (n *node) emptiest(request gpu.Memory) (card int, most gpu.Memory, ok bool) {
	if n.shareable() != placement.Fits {
		return 0, 0, false
	}
	for i := range n.cards {
		c := &n.cards[i]
		reserved := n.reserved(c)
		if c.Unhealthy || c.Memory.Sub(reserved) < request {
			continue
		}
		if free := c.Free().Sub(reserved); !ok || free > most {
			card, most, ok = c.Index, free, true
		}
	}
	return card, most, ok
}

// reserved returns what the starvation reservation has of the card.
func (n *node) reserved(c *placement.Card) (memory gpu.Memory) {
	for _, share := range n.starvation {
		if share.Card == c.Index {
			memory = memory.Add(share.Memory)
		}
	}
	return memory
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
func (l *Ledger) StarvationIdle() (idle gpu.Memory) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.starvation == nil {
		return 0
	}
	for _, name := range l.starvation.nodes() {
		if n := l.nodes[name]; n != nil {
			for i := range n.cards {
				idle = idle.Add(min(n.reserved(&n.cards[i]), n.cards[i].Free()))
			}
		}
	}
	return idle
}

package ledger

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// starvationReservation reserves memory on certain cards for certain pods. Running pods on these cards continue.
// Other pods of equal or lower priority see the reserved memory as used. There is at most one reservation at a time.
type starvationReservation struct {
	pods     map[gpu.PodUID]starvingPod
	priority int32
	label    string
}

// starvingPod is a pod for which memory is reserved on a node.
type starvingPod struct {
	node   string
	demand gpu.Demand
}

// ReserveForStarving reserves shares of cards for all requests, each on the emptiest cards, until
// EndStarvationReservation. The cards may still be in use, and become available when pods end. It reserves nothing and
// returns false if the requests don't fit even on empty cards, or don't fit by capacity. If all fit, the pods are taken from capacity.
// label names the pods for users.
func (l *Ledger) ReserveForStarving(requests []Request, priority int32, label string, capacity Capacity) bool {
	former, reserved := l.reserveForStarving(requests, priority, label, capacity)
	l.freed(former...) // Other pods can use the memory of a former reservation now.
	return reserved
}

// reserveForStarving is ReserveForStarving without the calls of the freed listeners. It returns the nodes of the former reservation.
func (l *Ledger) reserveForStarving(requests []Request, priority int32, label string, capacity Capacity) (former []string, reserved bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	former = l.endStarvationReservation()
	made := &starvationReservation{pods: map[gpu.PodUID]starvingPod{}, priority: priority, label: label}
	l.starvation = made
	ranks := rankings{ledger: l, rate: rateEmptiest, put: func(name string, n *node, pod gpu.Pod) bool {
		if capacity != nil && !capacity.Take(name, pod.UID) {
			return false
		}
		demand := pod.Demand()
		for _, card := range n.emptiest(&demand) {
			n.starvation = append(n.starvation, demand.On(card.Index)...)
		}
		made.pods[pod.UID] = starvingPod{name, demand}
		l.markChanged(n)
		return true
	}}
	for i := range requests {
		request := &requests[i]
		if _, allocated := l.nodeOf[request.Pod.UID]; allocated {
			continue
		}
		if _, ok := ranks.first(requests[i:]).place(request.Pod); !ok {
			l.endStarvationReservation()
			made.returnTo(capacity)
			return former, false
		}
	}
	return former, true
}

// nodes returns the names of the nodes, sorted. It includes nodes that have been deleted since.
func (s *starvationReservation) nodes() []string {
	names := make([]string, 0, len(s.pods))
	for _, pod := range s.pods {
		names = append(names, pod.node)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// returnTo returns the pods to the capacity (Return). capacity can be nil.
func (s *starvationReservation) returnTo(capacity Capacity) {
	if capacity == nil {
		return
	}
	for uid, pod := range s.pods {
		capacity.Return(pod.node, uid)
	}
}

// StarvationUsable reports whether the nodes of the starvation reservation still take its pods, and its cards exist, are healthy, and
// would hold what is reserved on them if they were empty. It returns false if there is no reservation.
func (l *Ledger) StarvationUsable() bool {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.starvation == nil {
		return false
	}
	for _, pod := range l.starvation.pods {
		n := l.nodes[pod.node]
		if n.accepts(&pod.demand) != reasons.Fits || !n.holdsReserved() {
			return false
		}
	}
	return true
}

// holdsReserved reports whether the node's cards would hold its part of the starvation reservation if they were empty.
func (n *node) holdsReserved() bool {
	for _, share := range n.starvation {
		i, ok := n.position(share.Card)
		if !ok || n.cards[i].Unhealthy {
			return false
		}
		if empty := n.cards[i].Empty(); !empty.Has(n.reserved(share.Card)) {
			return false
		}
	}
	return len(n.starvation) > 0
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
	l.freed(nodes...) // Other pods can use the memory now.
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

// rateEmptiest rates a node by the free room of the fullest of the cards that emptiest returns. It is called for each node under the lock, so it
// copies no cards.
func rateEmptiest(n *node, request *Request) (rate float64, fits bool) {
	var buffer [16]gpu.Memory
	demand := request.Pod.Demand()
	if n.accepts(&demand) != reasons.Fits {
		return 0, false
	}
	rooms := buffer[:0]
	for i := range n.cards {
		if left, ok := n.roomForStarving(&n.cards[i], &demand); ok {
			rooms = append(rooms, left.Room())
		}
	}
	if len(rooms) < demand.Cards {
		return 0, false
	}
	slices.Sort(rooms)
	return float64(rooms[len(rooms)-demand.Cards]), true
}

// emptiest returns the emptiest cards for the demand, among the cards that could hold it if they were empty. The emptiest card is the first. The
// starvation reservation counts as used. If there are too few cards, emptiest returns none.
func (n *node) emptiest(demand *gpu.Demand) (cards []placement.Card) {
	if n.accepts(demand) != reasons.Fits {
		return nil
	}
	for i := range n.cards {
		if left, ok := n.roomForStarving(&n.cards[i], demand); ok {
			cards = append(cards, left)
		}
	}
	if len(cards) < demand.Cards {
		return nil
	}
	slices.SortStableFunc(cards, func(a, b placement.Card) int { return cmp.Compare(b.Room(), a.Room()) })
	return cards[:demand.Cards]
}

// roomForStarving returns the card with the starvation reservation counted as used. ok is false if it couldn't hold the demand even if it
// were empty otherwise.
func (n *node) roomForStarving(c *placement.Card, demand *gpu.Demand) (left placement.Card, ok bool) {
	empty, left := c.Empty(), *c
	if len(n.starvation) > 0 {
		reserved := n.reserved(c.Index)
		empty.Add(reserved)
		left.Add(reserved)
	}
	return left, empty.Fits(demand)
}

// reserved returns the part of the card with this index that the starvation reservation has.
func (n *node) reserved(index int) (sum gpu.Share) {
	for _, share := range n.starvation {
		if share.Card == index {
			sum.Memory, sum.Cores, sum.Containers = sum.Memory.Add(share.Memory), sum.Cores.Add(share.Cores), sum.Containers+share.Containers
		}
	}
	return sum
}

// seesStarvationReservation reports whether the starvation reservation on the node counts as used for the pod.
func (l *Ledger) seesStarvationReservation(n *node, pod *gpu.Pod) bool {
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
			for _, c := range n.cards {
				idle = idle.Add(min(n.reserved(c.Index).Memory, c.Free()))
			}
		}
	}
	return idle
}

package ledger

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// claim is a starvation reservation: memory on certain cards that is held back for certain pods. Running pods on these
// cards go on. Other pods of equal or lower priority see the reserved memory as used. There is at most one at a time.
type claim struct {
	pods     map[gpu.PodUID]struct{}
	priority int32
	nodes    []string
}

// Claim reserves memory for all wants, each on the card with the most free memory, until Unclaim. The memory may still be
// in use: it becomes available as pods end. Claim reserves nothing and returns false if the wants don't fit even on empty
// cards.
func (l *Ledger) Claim(wants []Want, priority int32) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.unclaim()
	c := &claim{pods: map[gpu.PodUID]struct{}{}, priority: priority}
	l.claim = c
	for _, want := range wants {
		if _, held := l.homes[want.Pod.UID]; held {
			continue
		}
		name, card, ok := l.emptiest(want)
		if !ok {
			l.unclaim()
			return false
		}
		n := l.nodes[name]
		n.claimed = append(n.claimed, gpu.Share{Card: card, Memory: want.Pod.Request})
		c.pods[want.Pod.UID] = struct{}{}
		c.nodes = append(c.nodes, name)
	}
	return true
}

// Unclaim ends the starvation reservation, if there is one.
func (l *Ledger) Unclaim() {
	l.mu.Lock()
	nodes := l.unclaim()
	l.mu.Unlock()
	for _, name := range nodes {
		l.freed(name) // Other pods can use the memory now.
	}
}

func (l *Ledger) unclaim() (nodes []string) {
	if l.claim == nil {
		return nil
	}
	nodes = slices.Compact(slices.Sorted(slices.Values(l.claim.nodes)))
	for _, name := range nodes {
		if n := l.nodes[name]; n != nil {
			n.claimed = nil
		}
	}
	l.claim = nil
	return nodes
}

// emptiest returns the card with the most free memory among those that could hold the want if they were empty.
func (l *Ledger) emptiest(want Want) (node string, card int, ok bool) {
	var most gpu.Memory
	for _, name := range want.Nodes {
		n := l.nodes[name]
		if n.open() != placement.Fits {
			continue
		}
		for i := range n.cards {
			c := &n.cards[i]
			var claimed gpu.Memory
			for _, share := range n.claimed {
				if share.Card == c.Index {
					claimed = claimed.Add(share.Memory)
				}
			}
			if c.Unhealthy || c.Memory.Sub(claimed) < want.Pod.Request {
				continue
			}
			if free := c.Free().Sub(claimed); !ok || free > most {
				node, card, most, ok = name, c.Index, free, true
			}
		}
	}
	return node, card, ok
}

// claimedBefore reports whether the starvation reservation on the node counts as used for the pod.
func (l *Ledger) claimedBefore(n *node, pod gpu.Pod) bool {
	if len(n.claimed) == 0 || pod.Priority > l.claim.priority {
		return false
	}
	_, mine := l.claim.pods[pod.UID]
	return !mine
}

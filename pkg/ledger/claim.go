package ledger

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// claim is memory that is kept for certain pods as it comes free. Whoever holds it may go on; others of equal or lower
// priority find it taken. There is one claim at a time at most.
type claim struct {
	pods     map[gpu.PodUID]struct{}
	priority int32
	nodes    []string
}

// Claim keeps memory for the wants, on the cards that have most of it free already, until Unclaim: room for each of them,
// once others have left, and nothing where there aren't enough cards at all, however empty. It says whether it does.
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

// Unclaim ends the claim, where there is one.
func (l *Ledger) Unclaim() {
	l.mu.Lock()
	nodes := l.unclaim()
	l.mu.Unlock()
	for _, name := range nodes {
		l.freed(name) // For others there is more room than before, though none was given back.
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

// emptiest returns the card on which the want could be placed once others have left, and most is free now.
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

// claimedBefore says whether the pod finds claimed memory of the node taken.
func (l *Ledger) claimedBefore(n *node, pod gpu.Pod) bool {
	if len(n.claimed) == 0 || pod.Priority > l.claim.priority {
		return false
	}
	_, mine := l.claim.pods[pod.UID]
	return !mine
}

package placement

import (
	"github.com/gpushare/gpushare/pkg/gpu"
)

// NodeRoom is what a node has free.
type NodeRoom struct {
	Cards []Card
	// Beside is what is free beside the cards.
	Beside
	// Excluded has a bit for each kind of an Outlook. It is set if such pods can't use the node, whatever the node has free.
	Excluded uint64
}

// room is what a node has for one kind.
type room struct {
	// shares is the number of shares of the kind's demand that the cards have free, and memory what is free on these cards.
	shares int64
	memory gpu.Memory
	// pods is how many pods of the kind the node has room for.
	pods int64
}

// roomFor returns what the node has for a kind, which is at that position in the outlook.
func (n *NodeRoom) roomFor(position int, kind *Shape) (r room) {
	if n.Excluded&(1<<position) != 0 {
		return room{}
	}
	for i := range n.Cards {
		if shares := n.Cards[i].shares(&kind.Demand); shares > 0 {
			r.shares += shares
			r.memory += n.Cards[i].Free()
		}
	}
	r.pods = n.podsOf(kind, r.shares)
	return r
}

// podsOf returns how many pods of the kind that many shares are enough for, and what the node has beside them.
func (n *NodeRoom) podsOf(kind *Shape, shares int64) int64 {
	if kind.Cards == 1 {
		return n.atMost(shares, &kind.Beside)
	}
	pods := n.atMost(shares/int64(kind.Cards), &kind.Beside)
	for ; pods > 0; pods-- { // Each pod needs its shares on different cards. So with so many pods, a card gives at most that many shares.
		usable := int64(0)
		for i := range n.Cards {
			usable += min(n.Cards[i].shares(&kind.Demand), pods)
		}
		if usable >= pods*int64(kind.Cards) {
			break
		}
	}
	return pods
}

// atMost returns how many pods that need that much there is enough for, at most the given number.
func (b *Beside) atMost(pods int64, need *Beside) int64 {
	if pods == 0 {
		return 0
	}
	// Usually there is enough for all, and a multiplication is faster than a division.
	if float64(need.CPU)*float64(pods) > float64(b.CPU) {
		pods = quotient(b.CPU, need.CPU)
	}
	if float64(need.NodeMemory)*float64(pods) > float64(b.NodeMemory) {
		pods = quotient(b.NodeMemory, need.NodeMemory)
	}
	return pods
}

// fits reports whether enough cards have room for the pod.
func (n *NodeRoom) fits(pod *Shape) bool {
	cards := 0
	for i := range n.Cards {
		if n.Cards[i].Fits(&pod.Demand) {
			cards++
		}
	}
	return cards >= pod.Cards
}

// shares returns how many shares of the demand the card has free.
func (c *Card) shares(demand *gpu.Demand) int64 {
	free := c.Free()
	if c.Unhealthy || free < demand.Memory {
		return 0
	}
	shares := quotient(int64(free), int64(demand.Memory))
	if demand.Cores > 0 {
		shares = min(shares, int64(c.FreeCores()/demand.Cores))
	}
	if c.MaxContainers > 0 {
		shares = min(shares, int64(c.FreeContainers()/max(demand.Containers, 1)))
	}
	return shares
}

// quotient returns a divided by b, rounded down; 0 if a is negative. The floating-point division is much faster than that of integers, and exact for
// amounts below 2^53.
func quotient(a, b int64) int64 {
	return int64(float64(max(a, 0)) / float64(max(b, 1)))
}

// with returns what the node has free beside the pod, and the positions of the cards that the pod gets, which are appended to changed. If too few
// cards have room, it gets what the emptiest ones have. cards replaces the memory for the copy of the node's cards.
func (n *NodeRoom) with(pod *Shape, cardPolicy *Policy, cards []Card, changed []int) (NodeRoom, []int) {
	after := NodeRoom{Cards: n.Cards, Beside: Beside{CPU: n.CPU - pod.CPU, NodeMemory: n.NodeMemory - pod.NodeMemory}, Excluded: n.Excluded}
	if pod.Cards == 0 {
		return after, changed
	}
	var buffer [usualCards]pick
	picks := cardPolicy.choose(n.Cards, &pod.Demand, buffer[:0])
	if len(picks) < pod.Cards {
		picks = Spread.choose(n.Cards, &gpu.Demand{Cards: pod.Cards, Memory: 1}, buffer[:0])
	}
	after.Cards = append(cards, n.Cards...)
	for _, p := range picks {
		after.Cards[p.position].Add(gpu.Share{Memory: pod.Memory, Cores: pod.Cores, Containers: pod.Containers})
		changed = append(changed, p.position)
	}
	return after, changed
}

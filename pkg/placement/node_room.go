package placement

import "slices"

// NodeRoom is what a node has free.
type NodeRoom struct {
	Cards []Card
	// NodeResources is what is free beside the cards, and All what the node has of it for pods.
	NodeResources
	All NodeResources
	// Excluded has a bit for each kind of an Outlook. It is set if such pods can't use the node, whatever the node has free.
	Excluded uint64
}

// Equal reports whether both nodes have the same cards, and the same free on and beside them, such as the empty nodes of a large group.
func (n *NodeRoom) Equal(o *NodeRoom) bool {
	return n.NodeResources == o.NodeResources && n.All == o.All && n.Excluded == o.Excluded && slices.Equal(n.Cards, o.Cards)
}

// memory returns the free memory of the healthy cards, and their memory.
func (n *NodeRoom) memory() (free, all float64) {
	for i := range n.Cards {
		if c := &n.Cards[i]; !c.Unhealthy {
			free, all = free+float64(c.Free()), all+float64(c.Memory)
		}
	}
	return free, all
}

// kindRoom is what a node has for one kind.
type kindRoom struct {
	kind *weighedKind
	// sharesByCard is how many shares of the kind's demand each card has free, shares their sum, and memory what is free on these cards.
	sharesByCard   []float64
	shares, memory float64
	// pods is how many pods of the kind the node has room for.
	pods float64
}

// roomFor returns what the node has for a kind, which is at that position in the outlook. on is memory for the result: a number for each card.
func (n *NodeRoom) roomFor(position int, kind *weighedKind, on []float64) (r kindRoom) {
	if n.Excluded&(1<<position) != 0 || n.CPU < kind.CPU || n.NodeMemory < kind.NodeMemory {
		return r
	}
	r.kind, r.sharesByCard = kind, on
	for i := range n.Cards {
		free := float64(n.Cards[i].Free())
		if r.sharesByCard[i] = kind.sharesOf(&n.Cards[i], free); r.sharesByCard[i] > 0 {
			r.shares += r.sharesByCard[i]
			r.memory += free
		}
	}
	if r.shares > 0 {
		left := n.amounts()
		r.pods = kind.podsOf(r.sharesByCard, r.shares, &left)
	}
	return r
}

// usableOnceEmpty reports whether the node has room for a pod of the kind once its pods have ended, also those that use no cards.
func (n *NodeRoom) usableOnceEmpty(position int, kind *weighedKind) bool {
	if n.Excluded&(1<<position) != 0 || n.All.CPU < kind.CPU || n.All.NodeMemory < kind.NodeMemory {
		return false
	}
	cards := 0
	for i := range n.Cards {
		if c := &n.Cards[i]; !c.Unhealthy && c.fitsEmpty(&kind.Demand) {
			cards++
		}
	}
	return cards >= kind.Cards
}

// amounts is NodeResources for computing with whole.
type amounts struct{ cpu, nodeMemory float64 }

func (b NodeResources) amounts() amounts {
	return amounts{cpu: float64(max(b.CPU, 0)) + 0.5, nodeMemory: float64(max(b.NodeMemory, 0)) + 0.5}
}

// whole returns the amount divided by an integer without the rest. The amount is an integer, to which 0.5 is added so that the product with the
// reciprocal is never rounded down to a smaller integer. It is exact for amounts below 2^50, and much faster than a division.
func whole(amount, reciprocal float64) float64 { return float64(int64(amount * reciprocal)) }

// podsOf returns how many pods of the kind that many shares on the cards are enough for, of which shares is the sum, and what is free beside the
// cards.
func (k *weighedKind) podsOf(on []float64, shares float64, beside *amounts) float64 {
	if k.Cards == 1 {
		return k.atMost(shares, beside)
	}
	pods := k.atMost(whole(shares+0.5, 1/float64(k.Cards)), beside)
	for ; pods > 0; pods-- { // Each pod needs its shares on different cards. So with so many pods, a card gives at most that many shares.
		usable := 0.0
		for _, shares := range on {
			usable += min(shares, pods)
		}
		if usable >= pods*float64(k.Cards) {
			break
		}
	}
	return pods
}

// atMost returns how many pods of the kind there is enough for beside the cards, at most the given number.
func (k *weighedKind) atMost(pods float64, beside *amounts) float64 {
	// The rate is infinite if a pod needs nothing.
	return float64(int64(min(pods, beside.cpu*k.cpuRate, beside.nodeMemory*k.nodeMemoryRate)))
}

// sharesOf returns how many shares of the kind's demand the card has free, of which that much memory is free.
func (k *weighedKind) sharesOf(c *Card, free float64) float64 {
	if c.Unhealthy || c.Lacks(&k.Demand) {
		return 0
	}
	shares := whole(free+0.5, k.shareRate)
	if k.Cores > 0 {
		shares = min(shares, float64(c.FreeCores()/k.Cores))
	}
	if c.MaxContainers > 0 {
		shares = min(shares, float64(c.FreeContainers()/max(k.Containers, 1)))
	}
	return shares
}

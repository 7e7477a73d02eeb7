package ledger

import (
	"cmp"
	"maps"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// node is one node's page of the ledger, guarded by the ledger's lock.
type node struct {
	// What Rank looks at for every node and pod comes first, and so shares few cache lines.

	// known says that the node object exists; without it the node has holders only.
	known      bool
	wholeCards bool
	// called is the node's place in the roll, guarded by that.
	called int
	// totals are those of the cards.
	totals placement.Totals
	// cards, in the order of offered, with what the holders take of each: recount and take keep it so.
	cards []placement.Card
	// nominees are the pods that wait for this node, see Nominate, the highest priority first.
	nominees []nominee
	// promised are the pods that may be about to come, see Promise.
	promised []promised
	// claimed is what of the cards is claimed, see Claim.
	claimed gpu.Placement

	unit   gpu.Unit
	closed string
	// offered are the cards as the node tells of them, ordered by index.
	offered []gpu.Card
	holders map[gpu.PodUID]*Holder
	// revision is the ledger's at the last change.
	revision uint64
}

// offer records what the node object offers. The cards stand with nothing taken until recount.
func (n *node) offer(spec NodeSpec) {
	n.known, n.unit, n.wholeCards, n.closed = true, spec.Unit, spec.WholeCards, spec.Closed
	n.offered = slices.SortedFunc(slices.Values(spec.Cards), func(a, b gpu.Card) int { return a.Index - b.Index })
	n.cards = make([]placement.Card, len(n.offered))
	for i, c := range n.offered {
		n.cards[i] = placement.NewCard(c, 0)
	}
}

// forget takes back what offer recorded.
func (n *node) forget() {
	n.known, n.unit, n.wholeCards, n.closed, n.offered, n.cards = false, 0, false, "", nil, nil
}

// open says whether the node shares its cards at all: Fits, or the reason why not. A node that isn't known may be nil.
func (n *node) open() placement.Reason {
	switch {
	case n == nil || !n.known:
		return placement.NotShared
	case n.wholeCards:
		return placement.WholeCards
	}
	return placement.Fits
}

// recount adds up from the holders what is taken of each card. Counting anew costs little at the number of pods that a
// node runs, and leaves no way for sums to drift.
//
// Holders whose card is told come first, presumed ones fill in around them: those that have their room still keep it,
// so that a guess which the node may have acted on doesn't wander off to another card; the others are placed anew.
func (n *node) recount() {
	for i := range n.cards {
		n.cards[i].Used = 0
	}
	var presumed []*Holder
	for _, h := range n.holders {
		if h.Presumed {
			presumed = append(presumed, h)
			continue
		}
		add(n.cards, h.Placement)
	}
	slices.SortFunc(presumed, func(a, b *Holder) int { return cmp.Compare(a.UID, b.UID) })
	var homeless []*Holder
	for _, h := range presumed {
		if n.hasRoom(h.Placement) {
			add(n.cards, h.Placement)
		} else {
			homeless = append(homeless, h)
		}
	}
	for _, h := range homeless {
		h.Placement, _ = placement.Place(placement.Binpack, n.cards, h.Request)
		add(n.cards, h.Placement)
	}
	n.totals = placement.Sum(n.cards)
}

// take counts a new holder's placement.
func (n *node) take(where gpu.Placement) {
	add(n.cards, where)
	n.totals = placement.Sum(n.cards)
}

// hasRoom says whether each of the cards exists and has that much left, well or not: a pod that sits on a card doesn't
// leave it when the card falls ill.
func (n *node) hasRoom(where gpu.Placement) bool {
	for _, share := range where {
		if i, ok := n.position(share.Card); !ok || n.cards[i].Free() < share.Memory {
			return false
		}
	}
	return len(where) > 0
}

// position finds a card by its index.
func (n *node) position(index int) (int, bool) { return position(n.cards, index) }

// position finds a card by its index among cards that are ordered by it.
func position(cards []placement.Card, index int) (int, bool) {
	return slices.BinarySearchFunc(cards, index, func(c placement.Card, index int) int { return c.Index - index })
}

// add counts a placement as taken.
func add(cards []placement.Card, where gpu.Placement) {
	for _, share := range where {
		if i, ok := position(cards, share.Card); ok {
			cards[i].Used = cards[i].Used.Add(share.Memory)
		}
	}
}

// room are the cards on which something could be placed, as they are now.
func (n *node) room() []placement.Card {
	if n.open() != placement.Fits {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(n.cards), func(c placement.Card) bool { return c.Unhealthy })
}

// roomierThan says whether more can be placed on some card than before.
func (n *node) roomierThan(before []placement.Card) bool {
	return slices.ContainsFunc(n.room(), func(c placement.Card) bool {
		i, ok := position(before, c.Index)
		return c.Free() > 0 && (!ok || c.Free() > before[i].Free())
	})
}

func (n *node) copy(name string) Node {
	out := Node{
		Name:     name,
		NodeSpec: NodeSpec{Unit: n.unit, Cards: slices.Clone(n.offered), WholeCards: n.wholeCards, Closed: n.closed},
		Holders:  make([]Holder, 0, len(n.holders)),
	}
	for _, c := range n.cards {
		out.Used = append(out.Used, c.Used)
	}
	for h := range maps.Values(n.holders) {
		out.Holders = append(out.Holders, h.copy())
	}
	slices.SortFunc(out.Holders, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name), cmp.Compare(a.UID, b.UID))
	})
	return out
}

func (h *Holder) copy() Holder {
	out := *h
	out.Placement = slices.Clone(h.Placement)
	return out
}

package placement

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// MaxScore is the best score of a node, kube-scheduler's limit for extenders
// (k8s.io/kube-scheduler/extender/v1 MaxExtenderPriority).
const MaxScore = 10

// Suitability says how well a node suits a request, from 0 to MaxScore. A node on which nothing fits has 0, and so may
// have one that is the worst that fits.
type Suitability float64

// Score is the suitability in kube-scheduler's whole points. Nodes of one score count as equally good: among them
// whatever else is known of the nodes may decide.
func (s Suitability) Score() int { return int(s) }

// Suit says whether and how well a node suits a request: cardPolicy chooses the card, as Place would, and nodePolicy
// judges what the request leaves over, eight points by what is left of that card and two by what is left of the node.
func Suit(cardPolicy, nodePolicy Policy, cards []Card, request gpu.Memory) (Suitability, Reason) {
	best, reason := choose(cardPolicy, cards, request)
	if reason != Fits {
		return 0, reason
	}
	var total, free gpu.Memory
	for i := range cards {
		total = total.Add(cards[i].Memory)
		free = free.Add(cards[i].Free())
	}
	card := fullness(cards[best].Memory, cards[best].Free().Sub(request))
	node := fullness(total, free.Sub(request))
	// fullness 1 is best for a policy that prefers little left over, 0 for one that prefers much.
	if !nodePolicy.better(0, 1) {
		card, node = 1-card, 1-node
	}
	return Suitability(card*8 + node*2), Fits
}

// fullness is the part of total that is taken, 0 to 1.
func fullness(total, free gpu.Memory) float64 {
	if total == 0 {
		return 0
	}
	return 1 - float64(free)/float64(total)
}

// Candidate is a node that fits, by its position among those that were asked about.
type Candidate struct {
	Node  int
	Suits Suitability
}

// Best returns those of the candidates that share the best score, the k most suitable of them at most: the nodes that a
// scheduler would choose from if it let these scores alone decide. It works in place.
func Best(candidates []Candidate, k int) []Candidate {
	if len(candidates) == 0 {
		return nil
	}
	top := slices.MaxFunc(candidates, func(a, b Candidate) int { return cmp.Compare(a.Suits, b.Suits) }).Suits.Score()
	equals := slices.DeleteFunc(candidates, func(c Candidate) bool { return c.Suits.Score() < top })
	if len(equals) <= k {
		return equals
	}
	// Of thousands few are kept: they are kept in order, and most others are no better than the last of them.
	kept := equals[:k]
	slices.SortFunc(kept, bySuitability)
	for _, c := range equals[k:] {
		if bySuitability(c, kept[k-1]) < 0 {
			at, _ := slices.BinarySearchFunc(kept, c, bySuitability)
			copy(kept[at+1:], kept[at:])
			kept[at] = c
		}
	}
	return kept
}

// bySuitability puts the most suitable first, and of equal ones the one that comes first.
func bySuitability(a, b Candidate) int {
	switch {
	case a.Suits > b.Suits:
		return -1
	case a.Suits < b.Suits:
		return 1
	}
	return a.Node - b.Node
}

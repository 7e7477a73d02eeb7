package placement

import (
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
// totals are Sum's of these cards.
func Suit(cardPolicy, nodePolicy Policy, cards []Card, totals *Totals, request gpu.Memory) (Suitability, Reason) {
	if reason := totals.Fit(request); reason != Fits {
		return 0, reason
	}
	best := totals.choose(cardPolicy, cards, request)
	card := fullness(best.memory, best.free.Sub(request))
	node := fullness(totals.Memory, totals.Free.Sub(request))
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

// Best keeps the best of the candidates that it is shown, the most suitable first: those that share the best score, K of
// them at most. They are the nodes that a scheduler would choose from if it let these scores alone decide.
type Best struct {
	K int
	// kept are those that may be among them, fewer than twice as many; sifted says that the first K were the best so far.
	kept   []Candidate
	sifted bool
}

// Add shows a candidate. Of thousands most are no better than the last of those kept.
func (b *Best) Add(c Candidate) {
	if b.K <= 0 || b.sifted && bySuitability(c, b.kept[b.K-1]) > 0 {
		return
	}
	b.kept = append(b.kept, c)
	if len(b.kept)/2 >= b.K {
		b.sift()
	}
}

// sift leaves the best, in order.
func (b *Best) sift() {
	slices.SortFunc(b.kept, bySuitability)
	if len(b.kept) >= b.K {
		b.kept, b.sifted = b.kept[:b.K], true
	}
}

// Candidates returns those kept.
func (b *Best) Candidates() []Candidate {
	b.sift()
	for i, c := range b.kept {
		if c.Suits.Score() < b.kept[0].Suits.Score() {
			return b.kept[:i]
		}
	}
	return b.kept
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

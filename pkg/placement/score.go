package placement

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// MaxScore is the best score of a node, kube-scheduler's limit for extenders
// (k8s.io/kube-scheduler/extender/v1 MaxExtenderPriority).
const MaxScore = 10

// Suitability rates a node for a request, from 0 to MaxScore. It is 0 if the request doesn't fit, but not only then.
type Suitability float64

// Score returns the suitability in kube-scheduler's whole points. Nodes with the same score count as equally good, so that
// kube-scheduler's other scores decide among them.
func (s Suitability) Score() int { return int(s) }

// Suit returns the suitability of a node, and Fits or the reason why the request doesn't fit. cardPolicy chooses the card,
// as Place does. nodePolicy rates the memory that stays free: up to eight points for that card, up to two for the node.
// totals must be Sum(cards).
func Suit(cardPolicy, nodePolicy Policy, cards []Card, totals *Totals, request gpu.Memory) (Suitability, Reason) {
	if reason := totals.Fit(request); reason != Fits {
		return 0, reason
	}
	card := cardPolicy.choose(cards, request)
	used := func(memory, free gpu.Memory) float64 { return 1 - float64(free.Sub(request))/float64(memory) }
	return Suitability(8*nodePolicy.rate(used(card.Memory, card.Free())) + 2*nodePolicy.rate(used(totals.Memory, totals.Free))), Fits
}

// Candidate is a node that fits, by its position in the list of candidate nodes.
type Candidate struct {
	Node  int
	Suits Suitability
}

// Best collects candidates and keeps at most K of those with the best score, most suitable first: the nodes among which
// kube-scheduler would choose if these scores alone decided.
type Best struct {
	K int
	// kept has fewer than 2K entries. If sifted, its first K are the best so far, in order.
	kept   []Candidate
	sifted bool
}

// Add adds a candidate.
func (b *Best) Add(c Candidate) {
	if b.K <= 0 || b.sifted && bySuitability(c, b.kept[b.K-1]) > 0 {
		return
	}
	b.kept = append(b.kept, c)
	if len(b.kept)/2 >= b.K {
		b.sift()
	}
}

// sift sorts kept and truncates it to K.
func (b *Best) sift() {
	slices.SortFunc(b.kept, bySuitability)
	if len(b.kept) >= b.K {
		b.kept, b.sifted = b.kept[:b.K], true
	}
}

// Candidates returns the best candidates.
func (b *Best) Candidates() []Candidate {
	b.sift()
	for i, c := range b.kept {
		if c.Suits.Score() < b.kept[0].Suits.Score() {
			return b.kept[:i]
		}
	}
	return b.kept
}

// bySuitability orders by suitability, descending, then by position.
func bySuitability(a, b Candidate) int {
	return cmp.Or(cmp.Compare(b.Suits, a.Suits), cmp.Compare(a.Node, b.Node))
}

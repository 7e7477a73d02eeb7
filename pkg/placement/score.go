package placement

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// MaxScore is the best score of a node, kube-scheduler's limit for extenders
// (k8s.io/kube-scheduler/extender/v1 MaxExtenderPriority).
const MaxScore = 10

// Suitability rates a node for a demand, from 0 to MaxScore. It is 0 if the demand doesn't fit, but not only then.
type Suitability float64

// Score returns the suitability in kube-scheduler's whole points. Nodes with the same score count as equally good, so that
// kube-scheduler's other scores decide among them.
func (s Suitability) Score() int { return int(s) }

// Suit returns the suitability of a node, and Fits or the reason why the demand doesn't fit. cardPolicy chooses the cards,
// as Place does. nodePolicy rates what stays free in the scarcer dimension: up to eight points for these cards, up to two for the
// node. totals must be Sum(cards).
func Suit(cardPolicy, nodePolicy Policy, cards []Card, totals *Totals, demand gpu.Demand) (Suitability, Reason) {
	if reason := totals.Fit(cards, demand); reason != Fits {
		return 0, reason
	}
	var buffer [8]int // Most nodes have no more cards.
	var chosen Totals
	for _, i := range cardPolicy.choose(cards, demand, buffer[:0]) {
		c := &cards[i]
		chosen.Cards, chosen.Memory, chosen.Free, chosen.FreeCores = chosen.Cards+1, chosen.Memory.Add(c.Memory), chosen.Free.Add(c.Free()), chosen.FreeCores+c.FreeCores()
	}
	return Suitability(8*nodePolicy.rate(chosen.usedWith(&demand)) + 2*nodePolicy.rate(totals.usedWith(&demand))), Fits
}

// usedWith returns the fraction of the cards that is used after a placement, in the scarcer dimension.
func (t *Totals) usedWith(demand *gpu.Demand) float64 {
	used := 1 - float64(t.Free.Sub(demand.Total()))/float64(t.Memory)
	if all := gpu.CardCores * gpu.Cores(t.Cards); demand.Cores > 0 || t.FreeCores < all {
		used = max(used, 1-float64(t.FreeCores.Sub(demand.Cores*gpu.Cores(demand.Cards)))/float64(all))
	}
	return used
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

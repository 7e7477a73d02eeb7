package placement

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// MaxScore is the best score of a node, kube-scheduler's limit for extenders
// (k8s.io/kube-scheduler/extender/v1 MaxExtenderPriority).
const MaxScore = 10

// Suitability rates a node for a demand: the best node has the highest. It is from 0 to MaxScore, and 0 if the demand doesn't fit, but not only
// then. By cost, nearly all nodes have the same score: Policy.Scale makes them differ.
type Suitability float64

// Score returns the suitability in kube-scheduler's whole points. Nodes with the same score count as equally good, so that
// kube-scheduler's other scores decide among them.
func (s Suitability) Score() int { return int(s) }

// Suit returns the suitability of a node, and Fits or the reason why the demand doesn't fit. cardPolicy chooses the cards,
// as Place does. nodePolicy rates what stays free in the scarcer dimension: up to eight points for these cards, up to two for the
// node. One point is subtracted if the demand prefers cards near an adapter and gets others. totals must be Sum(cards).
func Suit(cardPolicy, nodePolicy *Policy, cards []Card, totals *Totals, demand *gpu.Demand) (Suitability, reasons.Reason) {
	memoryOnly := demand.MemoryOnly() && demand.RDMA == gpu.RDMANone
	if memoryOnly || demand.Memory > totals.MostFree {
		if reason := totals.Fit(cards, demand); reason != reasons.Fits { // Mostly without a look at the cards.
			return 0, reason
		}
	}
	var buffer [usualCards]pick
	picks := cardPolicy.choose(cards, demand, buffer[:0])
	if len(picks) < demand.Cards {
		return 0, totals.Fit(cards, demand)
	}
	var memory, free gpu.Memory
	var cores gpu.Cores
	for _, p := range picks {
		c := &cards[p.position]
		memory, free, cores = memory.Add(c.Memory), free.Add(c.Free()), cores+c.FreeCores()
	}
	onCards := usedWith(demand, memory, free, cores, demand.Cards)
	onNode := usedWith(demand, totals.Memory, totals.Free, totals.FreeCores, totals.Cards)
	suits := Suitability(8*nodePolicy.rate(onCards) + 2*nodePolicy.rate(onNode))
	if far(cards, picks, demand) {
		suits = max(suits-1, 0)
	}
	return suits, reasons.Fits
}

// far reports whether one of the cards isn't near an adapter, although the demand prefers it.
func far(cards []Card, picks []pick, demand *gpu.Demand) bool {
	return demand.RDMA == gpu.RDMAPreferred && slices.ContainsFunc(picks, func(p pick) bool { return !cards[p.position].NearAdapter })
}

// usedWith returns the fraction of n cards with this memory, of which that much is free, that is used after a placement, in the
// scarcer dimension.
func usedWith(demand *gpu.Demand, memory, free gpu.Memory, cores gpu.Cores, n int) float64 {
	used := 1 - float64(free.Sub(demand.Total()))/float64(memory)
	if all := gpu.CardCores * gpu.Cores(n); demand.Cores > 0 || cores < all {
		used = max(used, 1-float64(cores.Sub(demand.Cores*gpu.Cores(demand.Cards)))/float64(all))
	}
	return used
}

// SuitsByCost returns the suitability of a node on which a pod has this cost.
func SuitsByCost(cost float64) Suitability { return MaxScore / Suitability(1+max(cost, 0)) }

// Scale makes the scores of the candidates differ, if the policy is by cost: the best candidates, and no others, get MaxScore.
func (p *Policy) Scale(candidates []Candidate) {
	if !p.ByCost() || len(candidates) == 0 {
		return
	}
	best, worst := candidates[0].Suits, candidates[0].Suits
	for _, c := range candidates {
		best, worst = max(best, c.Suits), min(worst, c.Suits)
	}
	for i := range candidates {
		if suits := &candidates[i].Suits; *suits == best {
			*suits = MaxScore
		} else {
			*suits = (MaxScore - 1) * (*suits - worst) / (best - worst)
		}
	}
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
	if b.K <= 0 {
		return
	}
	if b.sifted { // Most candidates end here. This is bySuitability, which takes several times as long.
		if last := &b.kept[b.K-1]; c.Suits < last.Suits || c.Suits == last.Suits && c.Node > last.Node {
			return
		}
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

// All returns the K most suitable candidates, whatever their scores.
func (b *Best) All() []Candidate {
	b.sift()
	return b.kept
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

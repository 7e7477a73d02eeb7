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

// RateNode returns the suitability of a node, and Fits or the reason why the demand doesn't fit. cardPolicy chooses the cards,
// as Place does. nodePolicy rates what stays free in the scarcer dimension: up to eight points for these cards, up to two for the
// node. One point is subtracted if the demand prefers cards near an adapter and gets others.
func RateNode(cardPolicy, nodePolicy *Policy, cards []Card, demand *gpu.Demand) (Suitability, reasons.Reason) {
	if reason := Fit(cards, *demand); reason != reasons.Fits {
		return 0, reason
	}
	var buffer [usualCards]pick
	picks, totals := cardPolicy.choose(cards, demand, buffer[:0]), Sum(cards)
	var memory, free gpu.Memory
	var cores gpu.Cores
	for _, p := range picks {
		c := &cards[p.position]
		memory, free, cores = memory.Add(c.Memory), free.Add(c.Free()), cores+c.FreeCores()
	}
	onCards := usedWith(demand, memory, free, cores, demand.Cards)
	onNode := usedWith(demand, totals.Memory, totals.Free, totals.FreeCores, len(cards))
	suits := Suitability(8*nodePolicy.rate(onCards) + 2*nodePolicy.rate(onNode))
	if missesAdapter(cards, picks, demand) {
		suits = max(suits-1, 0)
	}
	return suits, reasons.Fits
}

// missesAdapter reports whether one of the cards isn't near an adapter, although the demand prefers it.
func missesAdapter(cards []Card, picks []pick, demand *gpu.Demand) bool {
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
	if !p.NeedsOutlook() || len(candidates) == 0 {
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

// Compare orders candidates: the most suitable first, and of equal ones the first in the list of candidate nodes.
func (c Candidate) Compare(o Candidate) int {
	return cmp.Or(cmp.Compare(o.Suits, c.Suits), cmp.Compare(c.Node, o.Node))
}

// Best returns at most k of the candidates with the best score, most suitable first: the nodes among which kube-scheduler would choose if these
// scores alone decided. It sorts the candidates.
func Best(candidates []Candidate, k int) []Candidate {
	slices.SortFunc(candidates, Candidate.Compare)
	best := candidates[:min(k, len(candidates))]
	return slices.DeleteFunc(best, func(c Candidate) bool { return c.Suits.Score() < best[0].Suits.Score() })
}

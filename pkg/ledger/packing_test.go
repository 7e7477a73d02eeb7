package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"unique"

	"github.com/gpushare/gpushare/pkg/arrivals"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// TestPacking places 3,000 random pods on 1,000 nodes of eight cards, one after the other. If every fifth of them asks for as much of two
// cards, or of four, nearly as much of the memory of the cards in use is allocated.
func TestPacking(t *testing.T) {
	one, several := packed(t, binpack, false), packed(t, binpack, true)
	t.Logf("allocated of the cards in use: %.1f%% by pods with one card, %.1f%% if a fifth has several", 100*one, 100*several)
	if one < 0.9 || several < one-0.02 {
		t.Errorf("too little is allocated of the cards in use: %.3f and %.3f", one, several)
	}
}

// TestPackingByCost is TestPacking with the policy least-waste. All sizes of pods are equally frequent, and most are no kind of the outlook.
func TestPackingByCost(t *testing.T) {
	view := binpack
	view.Node = placement.LeastWaste
	one, several := packed(t, view, false), packed(t, view, true)
	t.Logf("allocated of the cards in use: %.1f%% by pods with one card, %.1f%% if a fifth has several", 100*one, 100*several)
	if one < 0.97 || several < one-0.02 {
		t.Errorf("too little is allocated of the cards in use: %.3f and %.3f", one, several)
	}
}

// packed returns the part of the memory of the cards in use that is allocated.
func packed(t *testing.T, view ledger.View, several bool) float64 {
	const card = 16276
	f, random, seen := newFixture(t), rand.New(rand.NewPCG(1, 0)), arrivals.NewCounter()
	names := make([]string, 1000)
	for i := range names {
		names[i] = fmt.Sprint("n", i)
		f.SetNode(names[i], spec(card, card, card, card, card, card, card, card))
	}
	for i := range 3000 {
		p := pod(fmt.Sprint("p", i), 512+gpu.Memory(random.Int64N(card-512+1)))
		if several && i%5 == 0 {
			p.Cards = 2 + 2*(i/5%2)
			p.Request *= gpu.Memory(p.Cards)
		}
		if seen.Add(placement.Shape{Demand: p.Demand()}, unique.Make(string(p.UID)), at) && view.Node.NeedsOutlook() {
			f.Expect(seen.Kinds(), 0, view.Card, func(unique.Handle[string]) []string { return names })
		}
		node := f.best(view, p, names)
		f.reserve(node, p)
	}
	var used, cards gpu.Memory
	for _, node := range f.Nodes() {
		for _, amount := range node.Used {
			if amount > 0 {
				used, cards = used+amount, cards+card
			}
		}
	}
	return float64(used) / float64(cards)
}

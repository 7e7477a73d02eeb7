package preemption_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// fullNode returns a node of cards of 80, all full of pods of one card each, with different sizes and priorities.
func fullNode(cards, podsPerCard int) preemption.Node {
	var pods []preemption.Pod
	for c := range cards {
		left := gpu.Memory(80)
		for i := range podsPerCard {
			size := min(gpu.Memory(80/podsPerCard+1-i%2*2), left)
			left -= size
			pods = append(pods, on(c, size, gpu.PodUID(fmt.Sprintf("%d-%d", c, i)), priority(int32((i*7+c*3)%11)), proposed))
		}
	}
	return node(80, make([]gpu.Memory, cards), 0, pods...)
}

func fullNodeRequest(cards int) preemption.Request {
	demand := gpu.Demand{Cards: cards, Memory: 40}
	return preemption.Request{Demand: demand, Resources: preemption.Amounts{0, int64(demand.Total())}}
}

// All nodes of a call share the budget, and each that is decided gets victims that are enough. Nodes that are left when the budget is spent
// are not decided.
func TestBudgetOfAllNodes(t *testing.T) {
	for name, tc := range map[string]struct {
		nodes, cards, podsPerCard, demand int
		// left is true if nodes are left.
		left bool
	}{
		"one card of many nodes":                     {nodes: 1000, cards: 8, podsPerCard: 10, demand: 1},
		"several cards":                              {nodes: 100, cards: 16, podsPerCard: 20, demand: 8},
		"several cards of many nodes":                {nodes: 900, cards: 8, podsPerCard: 20, demand: 4},
		"more nodes than the budget is enough for":   {nodes: 10_000, cards: 8, podsPerCard: 20, demand: 4, left: true},
		"larger nodes than the budget is enough for": {nodes: 100, cards: 64, podsPerCard: 10, demand: 32, left: true},
	} {
		n, request := fullNode(tc.cards, tc.podsPerCard), fullNodeRequest(tc.demand)
		budget, decided := preemption.NewBudget(tc.nodes), 0
		for ; decided < tc.nodes && budget.Next(t.Context()); decided++ {
			victims, ok := preemption.Choose(n, request, budget)
			if !ok {
				t.Fatalf("%s: no victims on node %d", name, decided)
			}
			if decided%100 == 0 {
				checkEnoughFor(t, n, request, victims)
			}
		}
		if decided == 0 || (decided < tc.nodes) != tc.left {
			t.Errorf("%s: %d of %d nodes are decided", name, decided, tc.nodes)
		}
		// The last node takes what it needs for the first set: one plan for each card, and one for the set.
		if most := (2*tc.cards + tc.demand + 1) * len(n.Pods); -budget.Left() > most {
			t.Errorf("%s: %d steps more than the budget, want at most %d", name, -budget.Left(), most)
		}
	}
}

// checkEnoughFor fails the test unless enough cards have room without the victims.
func checkEnoughFor(t *testing.T, n preemption.Node, request preemption.Request, victims preemption.Victims) {
	t.Helper()
	cards := slices.Clone(n.Cards)
	for _, p := range n.Pods {
		if slices.Contains(victims.Pods, p.UID) {
			for _, share := range p.Placement {
				cards[share.Card].Subtract(share)
			}
		}
	}
	if reason := placement.Fit(cards, request.Demand); reason != reasons.Fits {
		t.Fatalf("without the victims: %v", reason)
	}
}

// After the end of the call no further node is decided.
func TestBudgetEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	budget := preemption.NewBudget(2)
	if !budget.Next(ctx) {
		t.Error("no steps at the beginning")
	}
	cancel()
	if budget.Next(ctx) {
		t.Error("steps after the end of the context")
	}
}

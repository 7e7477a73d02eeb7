package preemption_test

import (
	"fmt"
	"testing"

	"github.com/gpushare/gpushare/pkg/preemption"
)

// BenchmarkChoose measures the choice of victims in a preempt call with 100 nodes: kube-scheduler sends that many, or a tenth of all nodes if
// those are more.
func BenchmarkChoose(b *testing.B) {
	const nodes = 100
	for _, tc := range []struct{ cards, podsPerCard, demand int }{{8, 10, 1}, {8, 20, 1}, {8, 10, 4}, {8, 20, 4}, {16, 20, 8}, {64, 10, 32}} {
		n, request := fullNode(tc.cards, tc.podsPerCard), fullNodeRequest(tc.demand)
		b.Run(fmt.Sprintf("cards=%d,pods=%d,demand=%d", tc.cards, tc.cards*tc.podsPerCard, tc.demand), func(b *testing.B) {
			decided := 0
			for b.Loop() {
				budget := preemption.NewBudget(nodes)
				for i := 0; i < nodes && budget.Next(b.Context()); i++ {
					preemption.Choose(n, request, budget)
					decided++
				}
			}
			b.ReportMetric(float64(decided)/float64(b.N), "nodes/op")
		})
	}
}

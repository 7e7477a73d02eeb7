package preemption_test

import (
	"fmt"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
)

// BenchmarkChoose measures the choice of victims on one node of a preempt call. kube-scheduler sends a hundred, or a tenth of all nodes if those are
// more.
func BenchmarkChoose(b *testing.B) {
	for _, tc := range []struct{ cards, podsPerCard, demand int }{{8, 10, 1}, {8, 20, 1}, {8, 10, 4}, {8, 20, 4}, {16, 20, 8}, {64, 10, 32}} {
		n := fullNode(tc.cards, tc.podsPerCard)
		demand := gpu.Demand{Cards: tc.demand, Memory: 40}
		request := preemption.Request{Demand: demand, Resources: preemption.Amounts{0, int64(demand.Total())}}
		b.Run(fmt.Sprintf("cards=%d,pods=%d,demand=%d", tc.cards, tc.cards*tc.podsPerCard, tc.demand), func(b *testing.B) {
			for b.Loop() {
				preemption.Choose(n, request)
			}
		})
	}
}

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

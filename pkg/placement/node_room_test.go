package placement

import (
	"math"
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestPodsOfManyCards: cards with one share each are enough for one pod of that many cards, also where the product with the reciprocal of the number
// is rounded down, as for 49.
func TestPodsOfManyCards(t *testing.T) {
	for n := 2; n <= gpu.MaxCards; n++ {
		k := &weighedKind{Shape: Shape{Demand: gpu.Demand{Cards: n}}, cpuRate: math.Inf(1), nodeMemoryRate: math.Inf(1)}
		beside := NodeResources{}.amounts()
		if got := k.podsOf(slices.Repeat([]float64{1}, n), float64(n), &beside); got != 1 {
			t.Errorf("%d cards: room for %v pods, want 1", n, got)
		}
	}
}

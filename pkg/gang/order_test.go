package gang

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// TestRunList: a list stays ordered, and holds what was inserted and not removed.
func TestRunList(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	var list runList
	var all []*run
	for i := range 300 {
		r := &run{item: ledger.Item{Priority: int32(random.IntN(5)), Entered: begin.Add(time.Duration(random.IntN(20))), ID: string(rune(i))}}
		list.insert(r)
		all = append(all, r)
		if random.IntN(3) == 0 {
			j := random.IntN(len(all))
			list.remove(all[j])
			list.remove(all[j]) // Again, which does nothing.
			all = slices.Delete(all, j, j+1)
		}
	}
	slices.SortFunc(all, func(a, b *run) int { return a.item.Compare(&b.item) })
	if !slices.Equal(all, []*run(list)) {
		t.Error("the list differs from the sorted runs")
	}
}

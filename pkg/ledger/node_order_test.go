package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Rank, which remembers the order of the names in earlier calls, returns the same reasons as Check, which looks up every name.
func TestRankNodeOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	f := newFixture(t)
	var all []string
	for i := range 40 {
		all = append(all, fmt.Sprintf("n%d", i))
	}
	set := func(name string) { f.SetNode(name, spec(gpu.Memory(1+random.IntN(8)), gpu.Memory(1+random.IntN(8)))) }
	for _, name := range all[:30] { // The other nodes are unknown at first.
		set(name)
	}
	names := slices.Clone(all)
	for range 2000 {
		switch random.IntN(9) {
		case 0: // As from several of kube-scheduler's goroutines: parts in another order.
			at := random.IntN(len(names) + 1)
			names = slices.Concat(names[at:], names[:at])
		case 1:
			names = slices.Clone(names)
			random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		case 2:
			names = slices.Clone(all[:random.IntN(len(all)+1)])
		case 3:
			names = append(slices.Clone(names), all[random.IntN(len(all))]) // Can be a duplicate.
		case 8: // As a sample.
			at, to := random.IntN(len(all)), random.IntN(len(all))
			names = slices.Clone(all[min(at, to):max(at, to)])
		case 4:
			f.DeleteNode(all[random.IntN(len(all))])
		case 5:
			set(all[random.IntN(len(all))])
		}
		asking := pod("asking", gpu.Memory(1+random.IntN(9)))
		if want, got := f.check(asking, names...), f.rank(binpack, asking, names...); !slices.Equal(want, got) {
			t.Fatalf("%v:\n%v, want\n%v", names, got, want)
		}
	}
}

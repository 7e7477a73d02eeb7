package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"weak"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Rank, which uses a cache of the names in earlier calls, returns the same reasons as Check, which looks up every name.
func TestRankNameCache(t *testing.T) {
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
		switch random.IntN(8) {
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

// A list with many unknown names isn't cached, because the cache keeps its list until the next call.
func TestRankUnknownNamesNotCached(t *testing.T) {
	f := newFixture(t, spec(8), spec(8))
	rank := func(names []string) weak.Pointer[string] {
		f.rank(binpack, pod("asking", 1), names...)
		return weak.Make(&names[0])
	}
	kept := rank([]string{"n1", "n2"})
	others := rank(append([]string{"n1", "n2"}, make([]string, 1000)...))
	runtime.GC()
	if kept.Value() == nil {
		t.Error("the list of known nodes isn't cached")
	}
	if others.Value() != nil {
		t.Error("the list of a thousand unknown names is cached")
	}
	runtime.KeepAlive(f)
}

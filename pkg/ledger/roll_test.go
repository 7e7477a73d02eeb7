package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"weak"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Whatever lists came before, a name stands for its node: Rank, which goes by the list before, says what Check does, which
// looks every name up.
func TestRankFindsTheNodesOfEveryList(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	l := ledger.New(nil)
	var all []string
	for i := range 40 {
		all = append(all, fmt.Sprintf("n%d", i))
	}
	set := func(name string) { l.SetNode(name, spec(gpu.Memory(1+random.IntN(8)), gpu.Memory(1+random.IntN(8)))) }
	for _, name := range all[:30] { // The others aren't known, for now.
		set(name)
	}
	names := slices.Clone(all)
	for range 2000 {
		switch random.IntN(8) {
		case 0: // As from several workers: pieces in another order.
			at := random.IntN(len(names) + 1)
			names = slices.Concat(names[at:], names[:at])
		case 1:
			names = slices.Clone(names)
			random.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		case 2:
			names = slices.Clone(all[:random.IntN(len(all)+1)])
		case 3:
			names = append(slices.Clone(names), all[random.IntN(len(all))]) // Perhaps one that is named already.
		case 4:
			l.DeleteNode(all[random.IntN(len(all))])
		case 5:
			set(all[random.IntN(len(all))])
		}
		asking := pod("asking", gpu.Memory(1+random.IntN(9)))
		var want, got []placement.Reason
		l.Check(asking, names, func(_ string, r placement.Reason) { want = append(want, r) })
		l.Rank(ledger.View{Card: placement.Binpack, Node: placement.Binpack}, asking, names, func(_ int, _ placement.Suitability, r placement.Reason) {
			got = append(got, r)
		})
		if !slices.Equal(want, got) {
			t.Fatalf("%v:\n%v, want\n%v", names, got, want)
		}
	}
}

// Whoever names more than there is can't have it kept: the next list may be long in coming.
func TestRankKeepsNoListOfNodesThatThereAreNot(t *testing.T) {
	l := ledger.New(nil)
	l.SetNode("n1", spec(8))
	l.SetNode("n2", spec(8))
	rank := func(names []string) weak.Pointer[string] {
		fitting := 0
		l.Rank(ledger.View{Card: placement.Binpack, Node: placement.Binpack}, pod("asking", 1), names, func(_ int, _ placement.Suitability, r placement.Reason) {
			if r == placement.Fits {
				fitting++
			}
		})
		if fitting != 2 {
			t.Errorf("%d of %d names fit, want 2", fitting, len(names))
		}
		return weak.Make(&names[0])
	}
	kept := rank([]string{"n1", "n2"})
	others := rank(append([]string{"n1", "n2"}, make([]string, 1000)...))
	runtime.GC()
	if kept.Value() == nil {
		t.Error("a list of the nodes that there are isn't kept")
	}
	if others.Value() != nil {
		t.Error("a list of a thousand others is kept")
	}
	runtime.KeepAlive(l)
}

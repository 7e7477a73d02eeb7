package gang

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestUnknownPodsBounded: filter calls for pods that don't exist must not exhaust the memory.
func TestUnknownPodsBounded(t *testing.T) {
	mgr := New(Options{})
	for i := range maxUnknown + 100 {
		mgr.Filter(gpu.PodUID(fmt.Sprint(i)), nil, time.Unix(1, 0))
	}
	if got := len(mgr.unknownPods); got != maxUnknown {
		t.Errorf("%d unknown pods remembered, want %d", got, maxUnknown)
	}
	last := gpu.PodUID(fmt.Sprint(maxUnknown + 99))
	if _, ok := mgr.unknownPods[last]; !ok {
		t.Error("the last one is not remembered")
	}
}

// TestFingerprint: equal sets of candidate nodes are stored once, whatever their order.
func TestFingerprint(t *testing.T) {
	mgr := New(Options{})
	set := func(names ...string) *candidates { return mgr.intern(fingerprintOf(mgr.seed, names), names) }
	a := set("n1", "n2", "n3")
	if set("n3", "n1", "n2") != a {
		t.Error("the same nodes in another order are another set")
	}
	for _, names := range [][]string{{"n1", "n2"}, {"n1", "n2", "n4"}, {"n1", "n2", "n3", "n3"}, {"n1n2", "n3", ""}, nil} {
		if set(names...) == a {
			t.Errorf("%v counts as the same set", names)
		}
	}
	for i := range 2 * maxSets {
		set("n", string(rune(i)))
	}
	if len(mgr.sets) > maxSets {
		t.Errorf("%d sets are remembered", len(mgr.sets))
	}
}

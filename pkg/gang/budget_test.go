package gang

import (
	"testing"
	"time"
)

// TestBudget: which groups may get a starvation reservation after some costs. The cluster has 100 units.
func TestBudget(t *testing.T) {
	type may struct{ first, again bool }
	for name, tc := range map[string]struct {
		spend func(b *budget)
		after time.Duration
		want  may
	}{
		"at the start":                  {func(*budget) {}, 0, may{true, true}},
		"all memory for 21 s":           {func(b *budget) { b.charge(2100) }, 0, may{true, false}},
		"for an hour":                   {func(b *budget) { b.charge(360_000) }, 0, may{false, false}},
		"half an hour after":            {func(b *budget) { b.charge(360_000) }, 30 * time.Minute, may{true, false}},
		"a bit more than an hour after": {func(b *budget) { b.charge(360_000) }, 61 * time.Minute, may{true, true}},
	} {
		t.Run(name, func(t *testing.T) {
			var b budget
			b.refill(100, begin)
			tc.spend(&b)
			b.refill(100, begin.Add(tc.after))
			if got := (may{b.allows(false), b.allows(true)}); got != tc.want {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
	var unlimited budget
	unlimited.charge(360_000)
	if !unlimited.allows(true) {
		t.Error("a cluster of unknown memory has a budget")
	}
}

package gang

import (
	"slices"
	"testing"
	"time"
)

// TestBudget: who may reserve memory after some costs. The cluster has 100 units.
func TestBudget(t *testing.T) {
	type may struct{ newRound, failedRound, newStarving, failedStarving bool }
	all := may{true, true, true, true}
	for name, tc := range map[string]struct {
		spend func(b *budget)
		after time.Duration
		want  may
	}{
		"at the start":        {func(*budget) {}, 0, all},
		"all memory for 19 s": {func(b *budget) { b.chargeRound(100, 19*time.Second) }, 0, all},
		"for 21 s":            {func(b *budget) { b.chargeRound(100, 21*time.Second) }, 0, may{true, false, true, true}},
		"for 41 s":            {func(b *budget) { b.chargeRound(100, 41*time.Second) }, 0, may{false, false, true, true}},
		"a tenth for 210 s":   {func(b *budget) { b.chargeRound(10, 210*time.Second) }, 0, may{true, false, true, true}},
		"a minute after 21 s": {func(b *budget) { b.chargeRound(100, 21*time.Second) }, time.Minute, all},
		"ten minutes after 50 s": {func(b *budget) { b.chargeRound(100, 50*time.Second) }, 10 * time.Minute,
			may{true, false, true, true}},
		"nothing is saved beyond 20 s": {func(b *budget) {
			b.refill(100, begin.Add(time.Hour))
			b.chargeRound(100, 21*time.Second)
		}, time.Hour, may{true, false, true, true}},
		"a bit more than an hour after the process stood still for one": {func(b *budget) { b.chargeRound(100, time.Hour) }, 61 * time.Minute, all},
		"a starvation reservation that cost all memory for 21 s":        {func(b *budget) { b.chargeStarvation(2100) }, 0, may{true, true, true, false}},
		"for an hour":                   {func(b *budget) { b.chargeStarvation(360_000) }, 0, may{true, true, false, false}},
		"half an hour after":            {func(b *budget) { b.chargeStarvation(360_000) }, 30 * time.Minute, may{true, true, true, false}},
		"a bit more than an hour after": {func(b *budget) { b.chargeStarvation(360_000) }, 61 * time.Minute, all},
	} {
		t.Run(name, func(t *testing.T) {
			var b budget
			b.refill(100, begin)
			tc.spend(&b)
			b.refill(100, begin.Add(tc.after))
			got := may{b.allowsRound(false), b.allowsRound(true), b.allowsStarvation(false), b.allowsStarvation(true)}
			if got != tc.want {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
	var unlimited budget
	unlimited.chargeRound(100, time.Hour)
	if !unlimited.allowsRound(true) || !unlimited.allowsStarvation(true) {
		t.Error("a cluster of unknown memory has a budget")
	}
}

// TestBudgetBound: groups that fail whenever they may reserve, all memory each time and for as long as a round lasts, keep
// less than a twentieth of it over any hour.
func TestBudgetBound(t *testing.T) {
	const round = 30 * time.Second
	for name, failedBefore := range map[string]bool{"groups that failed before": true, "ever new groups": false} {
		t.Run(name, func(t *testing.T) {
			var b budget
			var kept []time.Time // each second in which memory is reserved
			for now := begin; now.Before(begin.Add(10 * time.Hour)); now = now.Add(time.Second) {
				if b.refill(100, now); b.allowsRound(failedBefore) {
					for range round / time.Second {
						kept = append(kept, now)
						now = now.Add(time.Second)
					}
					b.refill(100, now)
					b.chargeRound(100, round)
				}
			}
			for i, from := range kept {
				n := slices.IndexFunc(kept[i:], func(at time.Time) bool { return at.Sub(from) >= time.Hour })
				if n > 3600/20 {
					t.Fatalf("reserved for %d s of an hour", n)
				}
			}
			t.Logf("reserved for %d s of ten hours", len(kept))
		})
	}
}

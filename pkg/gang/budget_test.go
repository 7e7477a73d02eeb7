package gang

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// TestBudget: who may reserve memory after some costs. The cluster has 100 units.
func TestBudget(t *testing.T) {
	type may struct{ newRound, failedRound, newStarving, failedStarving bool }
	all, none := may{true, true, true, true}, may{}
	for name, tc := range map[string]struct {
		spend func(b *budget)
		after time.Duration
		want  may
	}{
		"at the start":           {func(*budget) {}, 0, all},
		"all memory for 19 s":    {func(b *budget) { b.chargeRound(100, 19*time.Second) }, 0, all},
		"for 21 s":               {func(b *budget) { b.chargeRound(100, 21*time.Second) }, 0, may{newRound: true, newStarving: true}},
		"for 41 s":               {func(b *budget) { b.chargeRound(100, 41*time.Second) }, 0, none},
		"a tenth for 210 s":      {func(b *budget) { b.chargeRound(10, 210*time.Second) }, 0, may{newRound: true, newStarving: true}},
		"a minute after 21 s":    {func(b *budget) { b.chargeRound(100, 21*time.Second) }, time.Minute, all},
		"ten minutes after 50 s": {func(b *budget) { b.chargeRound(100, 50*time.Second) }, 10 * time.Minute, may{newRound: true, newStarving: true}},
		"nothing is saved beyond 20 s": {func(b *budget) {
			b.refill(100, begin.Add(time.Hour))
			b.chargeRound(100, 21*time.Second)
		}, time.Hour, may{newRound: true, newStarving: true}},
		"a starvation reservation of an hour": {func(b *budget) { b.chargeStarvation(100 * 3600) }, 0, may{newRound: true}},
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

// TestOrder: which of two groups goes first.
func TestOrder(t *testing.T) {
	first := map[string][2]rank{
		"broken ones before important ones": {{broken: true}, {priority: 9}},
		"important ones before old ones":    {{priority: 1, created: begin.Add(1)}, {created: begin}},
		"those that never failed":           {{created: begin.Add(1)}, {failedAt: begin, created: begin}},
		"those that failed earlier":         {{failedAt: begin, created: begin.Add(1)}, {failedAt: begin.Add(1), created: begin}},
		"old ones":                          {{created: begin, name: "b"}, {created: begin.Add(1), name: "a"}},
		"by name":                           {{created: begin, name: "a"}, {created: begin, name: "b"}},
	}
	for name, pair := range first {
		if pair[0].compare(pair[1]) >= 0 || pair[1].compare(pair[0]) <= 0 || pair[0].compare(pair[0]) != 0 {
			t.Errorf("%s: not so", name)
		}
	}
}

// TestRunList: a list stays ordered, and holds what was inserted and not removed.
func TestRunList(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	var list runList
	var all []*run
	for i := range 300 {
		r := &run{rank: rank{priority: int32(random.IntN(5)), created: begin.Add(time.Duration(random.IntN(20))), name: string(rune(i))}}
		list.insert(r)
		all = append(all, r)
		if random.IntN(3) == 0 {
			j := random.IntN(len(all))
			list.remove(all[j])
			list.remove(all[j]) // Again, which does nothing.
			all = slices.Delete(all, j, j+1)
		}
	}
	slices.SortFunc(all, func(a, b *run) int { return a.rank.compare(b.rank) })
	if !slices.Equal(all, []*run(list)) {
		t.Error("the list differs from the sorted runs")
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

// TestStatus: what a member waits for, and since when.
func TestStatus(t *testing.T) {
	mgr := newManager(t)
	mgr.StartLeading(begin)
	at := begin
	status := func(uid gpu.PodUID) string {
		s, waits := mgr.Waits(uid)
		if !waits {
			return "doesn't wait"
		}
		if s.Group.Name != "job" {
			t.Errorf("group %v", s.Group)
		}
		return s.Phase.String() + " since " + s.Since.Sub(begin).String() + ", " + s.Reason.Text
	}
	want := func(uid gpu.PodUID, want string) {
		t.Helper()
		if got := status(uid); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	want("a", "doesn't wait")
	mgr.SetMember(newMember("a", 0, sized(2)), at)
	want("a", "incomplete since 0s, gang: 1 of 2 members exist")
	mgr.SetMember(newMember("b", 0, sized(2), func(m *Member) { m.Gated = true }), at)
	want("a", "incomplete since 0s, gang: 1 of 2 members exist, 1 more can't be placed because of scheduling gates or an invalid group")
	mgr.SetMember(newMember("b", 0, sized(3)), at)
	want("a", "incomplete since 0s, gang: the members disagree on the group's size")
	at = at.Add(time.Minute)
	mgr.SetMember(newMember("b", 0, sized(2)), at)
	want("a", "pending since 1m0s, gang: kube-scheduler hasn't tried all other members yet")
	at = at.Add(time.Minute)
	mgr.Filter("a", []string{"n"}, at)
	want("b", "pending since 1m0s, gang: there is no room for all members at once")
	mgr.SetMember(newMember("c", 0, sized(2), func(m *Member) { m.Problem, m.Size = "the size is no number", 0 }), at)
	want("c", "pending since 1m0s, gang: the size is no number")
	at = at.Add(time.Minute)
	mgr.SetMember(newMember("a", 0, sized(2), inRun("", 9)), at)
	want("a", "doesn't wait")
	want("b", "broken since 1m0s, gang: only 1 of 2 members are bound, there is no room for all members at once")
	mgr.SetMember(newMember("b", 0, sized(2), inRun("", 9)), at)
	want("b", "doesn't wait")
	mgr.StopLeading(at)
	mgr.SetMember(newMember("d", 0), at)
	want("d", "doesn't wait")
	launcher := newMember("launcher", 0, func(m *Member) { m.Cardless = true })
	mgr.SetMember(launcher, at)
	for uid, want := range map[gpu.PodUID]bool{"d": true, "not seen yet": true, "launcher": false} {
		if got := mgr.InPendingGang(uid); got != want {
			t.Errorf("%s must wait for its group: %t", uid, got)
		}
	}
}

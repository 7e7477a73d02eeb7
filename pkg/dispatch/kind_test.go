package dispatch

import (
	"strings"
	"testing"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// like returns a pod with a family.
func like(text string, memory gpu.Memory) *pod {
	return &pod{Pod: &Pod{Pod: gpu.Pod{Request: memory}, RoomKey: unique.Make(text)}}
}

// What has no room rules out what requests more, in the same round and for pods that are alike otherwise.
func TestKinds(t *testing.T) {
	k := kinds{}
	kindOf := func(pods ...*pod) *kind { return k.kindOf(pods) }
	one, two, four, other := kindOf(like("a", 1)), kindOf(like("a", 2)), kindOf(like("a", 4)), kindOf(like("b", 4))
	for i, tc := range []struct {
		name string
		fail []*kind
		want map[*kind]bool
	}{
		{"the largest has no room", []*kind{four}, map[*kind]bool{one: false, two: false, four: true, other: false}},
		{"a smaller one has none in the next round", []*kind{two}, map[*kind]bool{one: false, two: true, four: true, other: false}},
		{"both have none", []*kind{two, four}, map[*kind]bool{one: false, two: true, four: true, other: false}},
		{"another family", []*kind{other}, map[*kind]bool{one: false, two: false, four: false, other: true}},
	} {
		round := uint64(i + 1)
		for _, kind := range tc.fail {
			kind.fail(round)
		}
		for kind, noRoom := range tc.want {
			want(t, tc.name, noRoom, kind.hasNoRoom(round))
		}
	}
	group := kindOf(like("a", 2), like("a", 1))
	want(t, "groups with the same amounts are of one kind", true, group == kindOf(like("a", 2), like("a", 1)))
	want(t, "groups with different amounts are of one kind", false, group == kindOf(like("a", 2), like("a", 2)))

	for _, kind := range []*kind{one, two, four, other, group, kindOf(like("a", 2), like("a", 2))} {
		k.drop(kind)
	}
	want(t, "families of dropped kinds", 0, len(k))
}

// Finding the nodes for large constraints counts as more effort, but leaves half of a round's to other tenants.
func TestEffortOfConstraints(t *testing.T) {
	f := newFixture(t, []gpu.Memory{16}, nil)
	for _, tc := range []struct {
		name        string
		size, costs int
	}{
		{"small", 100, constraintsEffort}, {"3 KiB", 3000, 3 * constraintsEffort}, {"16 KiB", 16_000, maxTenantEffort},
	} {
		before := f.effort
		constraints := unique.Make(strings.Repeat("x", tc.size))
		for range 2 { // The second time the nodes are known.
			f.spendFor(constraints)
			f.Nodes.Names(constraints)
		}
		if got := f.effort - before; got != tc.costs {
			t.Errorf("%s: %d, want %d", tc.name, got, tc.costs)
		}
	}
}

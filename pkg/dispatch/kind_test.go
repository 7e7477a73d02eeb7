package dispatch

import (
	"testing"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// like returns a pod with a likeness.
func like(text string, memory gpu.Memory) *pod {
	return &pod{Pod: &Pod{Pod: gpu.Pod{Request: memory}, Likeness: unique.Make(text)}}
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
		{"another likeness", []*kind{other}, map[*kind]bool{one: false, two: false, four: false, other: true}},
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

	two.tried, two.units = true, 1
	k.retry()
	want(t, "kinds that were tried", false, two.tried)
	want(t, "kinds without units are dropped", 1, len(k))
}

package gang

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestOrder: which of two groups goes first.
func TestOrder(t *testing.T) {
	first := map[string][2]rank{
		"broken ones before important ones": {{broken: true}, {priority: 9}},
		"important ones before old ones":    {{priority: 1, created: begin.Add(1)}, {created: begin}},
		"those that never failed":           {{created: begin.Add(1)}, {failedAt: begin, created: begin}},
		"those that failed earlier":         {{failedAt: begin, created: begin.Add(1)}, {failedAt: begin.Add(1), created: begin}},
		"old ones":                          {{created: begin, key: Key{Name: "b"}}, {created: begin.Add(1), key: Key{Name: "a"}}},
		"native groups last":                {{created: begin, key: Key{Name: "a"}}, {created: begin, key: Key{Name: "a", Native: true}}},
		"by name":                           {{created: begin, key: Key{Name: "a"}}, {created: begin, key: Key{Name: "b"}}},
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
		r := &run{rank: rank{priority: int32(random.IntN(5)), created: begin.Add(time.Duration(random.IntN(20))), key: Key{Name: string(rune(i))}}}
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

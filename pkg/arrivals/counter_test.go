package arrivals

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
	"unique"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/check"
)

var begin = time.Unix(1_800_000_000, 0)

// pod is a pod that a Counter sees.
type pod struct {
	memory gpu.Memory
	owner  string
	age    time.Duration
}

func (p pod) shape() placement.Shape {
	if p.memory == 0 {
		return placement.Shape{}
	}
	return placement.Shape{Demand: gpu.Demand{Cards: 1, Memory: p.memory, Containers: 1}}
}

// counted returns the Counter that has seen the pods in this order.
func counted(pods []pod) *Counter {
	c := NewCounter()
	for _, p := range pods {
		c.Add(p.shape(), unique.Make(p.owner), begin.Add(-p.age))
	}
	return c
}

// frequencies returns the kinds' frequencies by memory.
func frequencies(c *Counter) map[gpu.Memory]float64 {
	out := map[gpu.Memory]float64{}
	for _, kind := range c.Kinds() {
		out[kind.Memory] = kind.Frequency
	}
	return out
}

// many returns pods of one size and age; each has its own owner if owner is empty.
func many(n int, memory gpu.Memory, owner string, age time.Duration) (pods []pod) {
	for i := range n {
		p := pod{memory, owner, age}
		if owner == "" {
			p.owner = fmt.Sprint("own-", memory, age, i)
		}
		pods = append(pods, p)
	}
	return pods
}

func TestKinds(t *testing.T) {
	join := func(lists ...[]pod) (all []pod) {
		for _, list := range lists {
			all = append(all, list...)
		}
		return all
	}
	for name, tc := range map[string]struct {
		pods []pod
		want map[gpu.Memory]float64
	}{
		"none":                                    {nil, nil},
		"pods without GPU memory":                 {many(3, 0, "", 0), nil},
		"each pod counts once":                    {join(many(3, 4, "", 0), many(2, 8, "", 0)), map[gpu.Memory]float64{4: 3, 8: 2}},
		"a huge Deployment counts up to a limit":  {join(many(500, 4, "huge", 0), many(30, 8, "", 0)), map[gpu.Memory]float64{4: 20, 8: 30}},
		"retries of a Job too":                    {join(many(100, 4, "retries", time.Minute), many(1, 8, "", 0)), map[gpu.Memory]float64{4: 19.990, 8: 1}},
		"an owner with two shapes":                {join(many(30, 4, "two", 0), many(2, 8, "two", 0)), map[gpu.Memory]float64{4: 20, 8: 2}},
		"a day old: half":                         {join(many(4, 4, "", 24*time.Hour), many(4, 8, "", 0)), map[gpu.Memory]float64{4: 2, 8: 4}},
		"survivors of a month ago are forgotten":  {join(many(9, 4, "", 30*24*time.Hour), many(2, 8, "", 0)), map[gpu.Memory]float64{8: 2}},
		"only survivors: their ages don't matter": {join(many(4, 4, "", 30*24*time.Hour), many(2, 8, "", 30*24*time.Hour)), map[gpu.Memory]float64{4: 4, 8: 2}},
	} {
		check.Equal(t, name, tc.want, frequencies(counted(tc.pods)), cmpopts.EquateApprox(0, 0.001), cmpopts.EquateEmpty())
	}
}

// TestWaiting: of the pods of one owner that wait, so many count as of those that come, and a pod that waits no more counts no more.
func TestWaiting(t *testing.T) {
	c := counted([]pod{{memory: 4}, {memory: 8}})
	wait := func(memory gpu.Memory, owner string, changes ...int) {
		for _, change := range changes {
			c.Wait(pod{memory: memory}.shape(), unique.Make(owner), change)
		}
	}
	waiting := func() map[gpu.Memory]int {
		out := map[gpu.Memory]int{}
		for _, kind := range c.Kinds() {
			out[kind.Memory] = kind.Waiting
		}
		return out
	}
	wait(4, "huge", slices.Repeat([]int{1}, 100)...)
	wait(4, "other", 1, 1, -1)
	wait(16, "a kind that didn't come", 1)
	check.Equal(t, "the result", map[gpu.Memory]int{4: maxPerOwner + 1, 8: 0}, waiting())
	wait(4, "huge", slices.Repeat([]int{-1}, 98)...)
	wait(4, "other", -1, -1)
	if diff := cmp.Diff(map[gpu.Memory]int{4: 2, 8: 0}, waiting()); diff != "" || len(c.waiting) != 2 {
		t.Errorf("most wait no more: %d sources (-want +got):\n%s", len(c.waiting), diff)
	}
}

// TestKindsOrder: replicas that see the same pods in other orders agree, and so does one that starts later.
func TestKindsOrder(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var pods []pod
	for range 500 {
		pods = append(pods, pod{gpu.Memory(random.IntN(9)), fmt.Sprint(random.IntN(20)), time.Duration(random.IntN(72)) * time.Hour})
	}
	same := counted(pods)
	first := frequencies(same)
	for range 20 {
		if diff := cmp.Diff(first, frequencies(same)); diff != "" {
			t.Fatalf("asked again (-first +again):\n%s", diff)
		}
		random.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
		if diff := cmp.Diff(first, frequencies(counted(pods)), cmpopts.EquateApprox(1e-9, 0)); diff != "" {
			t.Fatalf("in another order (-first +other):\n%s", diff)
		}
	}
}

// TestKindsLimits: there are MaxKinds kinds at most, the most frequent ones in order, and the memory of a Counter is bounded.
func TestKindsLimits(t *testing.T) {
	c := NewCounter()
	for i := range 2 * maxSources {
		p := pod{memory: gpu.Memory(1 + i%1000), owner: fmt.Sprint(i)}
		c.Add(p.shape(), unique.Make(p.owner), begin.Add(time.Duration(i)*time.Second))
	}
	for i := range 2 * maxPerOwner {
		for memory := range gpu.Memory(placement.MaxKinds) {
			p := pod{memory: 1 + memory}
			c.Add(p.shape(), unique.Make(fmt.Sprint("again", i)), begin.Add((2*maxSources-time.Duration(memory))*time.Second))
		}
	}
	kinds := c.Kinds()
	if len(kinds) != placement.MaxKinds || len(c.sources) > maxSources {
		t.Fatalf("%d kinds of %d sources", len(kinds), len(c.sources))
	}
	for i, kind := range kinds {
		if kind.Memory != gpu.Memory(1+i) {
			t.Fatalf("kind %d is of %d", i, kind.Memory)
		}
	}
}

// TestChanged: the kinds and the turnover are to be asked for often at first, and then seldom.
func TestChanged(t *testing.T) {
	c := NewCounter()
	for name, count := range map[string]func() bool{
		"pods that come":        func() bool { return c.Add(placement.Shape{}, unique.Make("owner"), begin) },
		"pods that were placed": c.Place,
	} {
		var changed []int
		for i := 1; i <= 600; i++ {
			if count() {
				changed = append(changed, i)
			}
		}
		check.Equal(t, name, []int{20, 50, 200, 400, 600}, changed)
	}
}

// TestTurnover: at first as many pods are expected to end as are placed, but not for long if none ends. Once a full cluster's pods end, the turnover
// grows with each pod that takes the place of another.
func TestTurnover(t *testing.T) {
	c := NewCounter()
	for _, tc := range []struct {
		name         string
		placed, ends int
		low, high    float64
	}{
		{"none yet", 0, 0, 1, 1},
		{"the first pods", 5, 0, 0.5, 0.5},
		{"pods are only placed", 95, 0, 0, 0.05},
		{"a full cluster: each pod takes the place of another", 100, 100, 0.5, 0.55},
		{"so it goes on", 800, 800, 0.9, 1},
		{"they only end", 0, 100, 1, 1},
		{"they are only placed again", 9000, 0, 0, 0.12},
	} {
		for range tc.placed {
			c.Place()
		}
		for range tc.ends {
			c.End()
		}
		if got := c.Turnover(); got < tc.low || got > tc.high {
			t.Errorf("%s: turnover %.3f, want %v to %v", tc.name, got, tc.low, tc.high)
		}
	}
}

package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// requests returns requests for the amounts, by pods named w0, w1 and so on.
func requests(nodes []string, amounts ...gpu.Memory) (out []ledger.Request) {
	for i, memory := range amounts {
		out = append(out, ledger.Request{Pod: pod(fmt.Sprint("w", i), memory), Nodes: nodes})
	}
	return out
}

// TestReserveAll runs on two nodes with two cards of 16 each.
func TestReserveAll(t *testing.T) {
	both, n1 := []string{"n1", "n2"}, []string{"n1"}
	halves := func(f *fixture) { f.reserve("n1", pod("a1", 8), pod("a2", 8), pod("b1", 8), pod("b2", 8)) }
	yielding := [][]gpu.PodUID{{"b1", "b2"}, {"a1", "a2"}}
	on := func(nodes ...string) (places []ledger.Reservation) {
		for _, node := range nodes {
			places = append(places, ledger.Reservation{Node: node})
		}
		return places
	}
	for name, tc := range map[string]struct {
		before   func(f *fixture)
		requests []ledger.Request
		yielding [][]gpu.PodUID
		// want is nil if there is no room; then nothing may have changed.
		want     []ledger.Reservation
		released int
		freed    []string
		gone     []gpu.PodUID
	}{
		"all fit":                         {requests: requests(both, 16, 16, 16, 16), want: on("n1", "n1", "n2", "n2")},
		"one too many":                    {requests: requests(both, 16, 16, 16, 10, 10)},
		"a member keeps its allocation":   {before: func(f *fixture) { f.reserve("n2", pod("w1", 16)) }, requests: requests(both, 16, 16), want: []ledger.Reservation{{Node: "n2"}, {Node: "n2", Existing: true}}},
		"a member has one elsewhere":      {before: func(f *fixture) { f.reserve("n2", pod("w1", 16)) }, requests: requests(n1, 16, 16)},
		"no more is released than needed": {before: halves, requests: requests(both, 16, 16, 16), yielding: yielding, want: on("n1", "n2", "n2"), released: 1, gone: yielding[0]},
		"releasing all doesn't help":      {before: halves, requests: requests(both, 16, 16, 16, 16, 16), yielding: yielding},
		"a bound pod isn't released": {
			before: func(f *fixture) { f.bind("n1", 0, pod("a1", 16)) }, requests: requests(both, 16, 16, 16, 16), yielding: [][]gpu.PodUID{{"a1"}},
		},
		"released memory that isn't needed is freed": {
			before:   func(f *fixture) { f.reserve("n1", pod("a1", 16)); f.reserve("n2", pod("a2", 16)) },
			requests: requests(n1, 16, 16), yielding: [][]gpu.PodUID{{"a1", "a2"}},
			want: on("n1", "n1"), released: 1, freed: []string{"n2"}, gone: []gpu.PodUID{"a1", "a2"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, spec(16, 16), spec(16, 16))
			if tc.before != nil {
				tc.before(f)
			}
			nodes := f.Nodes()
			before := uids(nodes)
			places, released := f.ReserveAll(tc.requests, tc.yielding, binpack, nil, at)
			expect(t, "places", tc.want, places)
			expect(t, "released sets", tc.released, released)
			expect(t, "freed", tc.freed, f.takeFreed())
			if places == nil {
				expect(t, "nodes", nodes, f.Nodes())
				return
			}
			times := map[time.Time]bool{}
			for i, place := range places {
				node, got, _ := f.Lookup(tc.requests[i].Pod.UID)
				if node != place.Node || got.State != ledger.Assumed || times[got.AssumeTime] && !place.Existing {
					t.Errorf("%s has %+v on %q", tc.requests[i].Pod, got, node)
				}
				times[got.AssumeTime] = true
			}
			want := slices.DeleteFunc(slices.Clone(before), func(uid gpu.PodUID) bool { return slices.Contains(tc.gone, uid) })
			for _, request := range tc.requests {
				want = append(want, request.Pod.UID)
			}
			slices.Sort(want)
			expect(t, "pods with an allocation", slices.Compact(want), uids(f.Nodes()))
		})
	}
}

// uids returns the pods with an allocation, sorted.
func uids(nodes []ledger.Node) (uids []gpu.PodUID) {
	for _, node := range nodes {
		for _, h := range node.Allocations {
			uids = append(uids, h.UID)
		}
	}
	slices.Sort(uids)
	return uids
}

func TestMove(t *testing.T) {
	f := newFixture(t, spec(16), spec(16))
	f.reserve("n1", pod("w", 16))
	for _, step := range []struct {
		to, want string
		ok       bool
	}{{"n2", "n2", true}, {"n3", "", false}} {
		node, ok := f.Move(ledger.Request{Pod: pod("w", 16), Nodes: []string{step.to}}, binpack, nil, at)
		expect(t, "Move to "+step.to, []any{step.want, step.ok}, []any{node, ok})
		expect(t, "the pod's node", "n2", f.nodeOf("w"))
	}
}

// TestStillUsable changes something about a pod with an allocation on card 0 of n1.
func TestStillUsable(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(f *fixture)
		want   bool
	}{
		"no change":                  {func(*fixture) {}, true},
		"released":                   {func(f *fixture) { f.Release("w") }, false},
		"node deleted":               {func(f *fixture) { f.DeleteNode("n1") }, false},
		"card unhealthy":             {func(f *fixture) { f.SetNode("n1", unhealthy(0, spec(16, 16))) }, false},
		"other card unhealthy":       {func(f *fixture) { f.SetNode("n1", unhealthy(1, spec(16, 16))) }, true},
		"card missing":               {func(f *fixture) { f.SetNode("n1", ledger.NodeSpec{Cards: spec(16, 16).Cards[1:]}) }, false},
		"node allocates whole cards": {func(f *fixture) { f.SetNode("n1", wholeCards(spec(16))) }, false},
		"presumed, and fits no card": {func(f *fixture) { f.SetNode("n1", spec(8)); f.Release("w"); f.SetBound("n1", pod("w", 16), nil, at) }, false},
	} {
		f := newFixture(t, spec(16, 16))
		f.reserve("n1", pod("w", 16))
		tc.change(f)
		expect(t, name, tc.want, f.StillUsable("w"))
	}
}

// TestReserveAllRandom checks ReserveAll with random reservations: no card is overcommitted, and a failure changes
// nothing.
func TestReserveAllRandom(t *testing.T) {
	nodes := []string{"n1", "n2"}
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 1))
		memory := func() gpu.Memory { return 1 + gpu.Memory(random.IntN(16)) }
		f := newFixture(t, spec(16, 16), spec(16, 16))
		var yielding [][]gpu.PodUID
		for i := range random.IntN(8) {
			p := pod(fmt.Sprint("r", i), memory())
			if _, err := f.Reserve(nodes[random.IntN(2)], p, placement.Binpack, at); err == nil {
				yielding = append(yielding, []gpu.PodUID{p.UID})
			}
		}
		var amounts []gpu.Memory
		for range 1 + random.IntN(6) {
			amounts = append(amounts, memory())
		}
		before := f.Nodes()
		places, released := f.ReserveAll(requests(nodes, amounts...), yielding, binpack, nil, at)
		if places == nil {
			expect(t, "nodes after a failure", before, f.Nodes())
			continue
		}
		for _, node := range f.Nodes() {
			for i, c := range node.Cards {
				if node.Used[i] > c.Memory {
					t.Errorf("card %d of %s has %d allocated", c.Index, node.Name, node.Used[i])
				}
			}
		}
		expect(t, "number of allocations", len(yielding)-released+len(amounts), len(uids(f.Nodes())))
		if t.Failed() {
			t.Fatalf("with seed %d", seed)
		}
	}
}

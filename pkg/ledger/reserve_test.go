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
	on := func(nodes ...string) (places []ledger.ChosenNode) {
		for _, node := range nodes {
			places = append(places, ledger.ChosenNode{Node: node})
		}
		return places
	}
	for name, tc := range map[string]struct {
		before   func(f *fixture)
		requests []ledger.Request
		yielding [][]gpu.PodUID
		// want is nil if there is no room; then nothing may have changed.
		want     []ledger.ChosenNode
		released int
		freed    []string
		gone     []gpu.PodUID
	}{
		"all fit":                       {requests: requests(both, 16, 16, 16, 16), want: on("n1", "n1", "n2", "n2")},
		"one too many":                  {requests: requests(both, 16, 16, 16, 10, 10)},
		"a member keeps its allocation": {before: func(f *fixture) { f.reserve("n2", pod("w1", 16)) }, requests: requests(both, 16, 16), want: []ledger.ChosenNode{{Node: "n2"}, {Node: "n2", Existing: true}}},
		"a member has one elsewhere":    {before: func(f *fixture) { f.reserve("n2", pod("w1", 16)) }, requests: requests(n1, 16, 16)},
		"each pod is nominated": {
			before: func(f *fixture) {
				for i, node := range []string{"n2", "n2", "n1", "n1"} {
					f.Nominate(node, pod(fmt.Sprint("w", i), 16))
				}
			},
			requests: requests(both, 16, 16, 16, 16), want: on("n2", "n2", "n1", "n1"), freed: []string{"n1", "n2"},
		},
		"the nominated node is full": {
			before: func(f *fixture) {
				f.Nominate("n1", pod("w1", 16))
				f.bind("n1", 0, pod("a1", 16))
				f.bind("n1", 1, pod("a2", 16))
			},
			requests: requests(both, 16, 16), want: on("n2", "n2"), freed: []string{"n1"},
		},
		"the nominated node is no candidate": {before: func(f *fixture) { f.Nominate("n2", pod("w0", 16)) }, requests: requests(n1, 16, 16), want: on("n1", "n1"), freed: []string{"n2"}},
		"no more is released than needed":    {before: halves, requests: requests(both, 16, 16, 16), yielding: yielding, want: on("n1", "n2", "n2"), released: 1, freed: both, gone: yielding[0]},
		"releasing all doesn't help":         {before: halves, requests: requests(both, 16, 16, 16, 16, 16), yielding: yielding},
		"a bound pod isn't released": {
			before: func(f *fixture) { f.bind("n1", 0, pod("a1", 16)) }, requests: requests(both, 16, 16, 16, 16), yielding: [][]gpu.PodUID{{"a1"}},
		},
		"some of the released memory isn't needed": {
			before:   func(f *fixture) { f.reserve("n1", pod("a1", 16)); f.reserve("n2", pod("a2", 16)) },
			requests: requests(n1, 16, 16), yielding: [][]gpu.PodUID{{"a1", "a2"}},
			want: on("n1", "n1"), released: 1, freed: both, gone: []gpu.PodUID{"a1", "a2"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, spec(16, 16), spec(16, 16))
			if tc.before != nil {
				tc.before(f)
			}
			f.takeFreed()
			nodes := f.Nodes()
			before := uids(nodes)
			places, released := f.ReserveAll(tc.requests, tc.yielding, binpack, at)
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
	f := newFixtureWith(t, &slots{free: map[string]int{"n1": 1, "n2": 1, "n3": 0}}, spec(16), spec(16), spec(16))
	f.reserve("n1", pod("w", 16))
	for _, step := range []struct {
		what string
		to   []string
		want string
		ok   bool
	}{
		{"to another node", []string{"n2"}, "n2", true},
		{"to an unknown node", []string{"n4"}, "", false},
		{"to a node without a free slot", []string{"n3"}, "", false},
		{"to its own place", []string{"n3", "n2"}, "n2", true},
	} {
		node, ok := f.Move(ledger.Request{Pod: pod("w", 16), Nodes: step.to}, binpack, at)
		expect(t, step.what, []any{step.want, step.ok}, []any{node, ok})
		expect(t, "the pod's node", "n2", f.nodeOf("w"))
	}
}

// TestStillUsable changes something about a pod with an allocation on card 0 of n1.
func TestStillUsable(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(f *fixture)
		want   bool
	}{
		"no change":                    {func(*fixture) {}, true},
		"released":                     {func(f *fixture) { f.Release("w") }, false},
		"node deleted":                 {func(f *fixture) { f.DeleteNode("n1") }, false},
		"card unhealthy":               {func(f *fixture) { f.SetNode("n1", unhealthy(0, spec(16, 16))) }, false},
		"other card unhealthy":         {func(f *fixture) { f.SetNode("n1", unhealthy(1, spec(16, 16))) }, true},
		"card missing":                 {func(f *fixture) { f.SetNode("n1", ledger.NodeSpec{Cards: spec(16, 16).Cards[1:]}) }, false},
		"node allocates whole cards":   {func(f *fixture) { f.SetNode("n1", wholeCards(spec(16))) }, false},
		"another scheduler's pod came": {func(f *fixture) { f.bind("n1", 0, pod("other", 16)) }, false},
		"it came to the other card":    {func(f *fixture) { f.bind("n1", 1, pod("other", 32)) }, true},
		"it came, and the place was moved": {func(f *fixture) {
			f.bind("n1", 0, pod("other", 16))
			f.Move(ledger.Request{Pod: pod("w", 16), Nodes: []string{"n1"}}, binpack, at)
		}, true},
		"another scheduler's container came": {func(f *fixture) {
			f.bind("n1", 0, pod("other", 0))
			f.SetNode("n1", limited(spec(16, 16), 1))
		}, false},
		"the card takes both containers": {func(f *fixture) {
			f.bind("n1", 0, pod("other", 0))
			f.SetNode("n1", limited(spec(16, 16), 2))
		}, true},
		"the card became smaller":    {func(f *fixture) { f.SetNode("n1", spec(8, 16)) }, false},
		"presumed, and fits no card": {func(f *fixture) { f.SetNode("n1", spec(8)); f.Release("w"); f.SetBound("n1", pod("w", 16), nil, at) }, false},
	} {
		f := newFixture(t, spec(16, 16))
		f.reserve("n1", pod("w", 16))
		tc.change(f)
		expect(t, name, tc.want, f.StillUsable("w"))
	}
}

// A node that lacks slots for one pod can take another one that needs less, and a node that lacks them for both is
// passed by.
func TestReserveAllResources(t *testing.T) {
	nodes := []string{"n1", "n2", "n3"}
	for name, tc := range map[string]struct {
		free map[string]int
		// needs are the needs of w0, w1 and so on.
		needs []int
		want  []string
	}{
		"enough everywhere":                    {map[string]int{"n1": 9, "n2": 9, "n3": 9}, []int{1, 1, 1}, []string{"n1", "n1", "n2"}},
		"the best node has none":               {map[string]int{"n1": 0, "n2": 9, "n3": 9}, []int{1, 1, 1}, []string{"n2", "n2", "n3"}},
		"the best node has enough for one pod": {map[string]int{"n1": 1, "n2": 9, "n3": 9}, []int{1, 1, 1}, []string{"n1", "n2", "n2"}},
		"the smaller pod fits beside":          {map[string]int{"n1": 1, "n2": 2, "n3": 0}, []int{2, 1}, []string{"n2", "n1"}},
		"nowhere enough for the last":          {map[string]int{"n1": 1, "n2": 1, "n3": 0}, []int{1, 1, 1}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s := &slots{free: tc.free, needs: map[gpu.PodUID]int{}}
			f := newFixtureWith(t, s, spec(16, 16), spec(16, 16), spec(16, 16))
			amounts := make([]gpu.Memory, len(tc.needs))
			for i, need := range tc.needs {
				amounts[i] = 16
				s.needs[gpu.PodUID(fmt.Sprint("w", i))] = need
			}
			places, _ := f.ReserveAll(requests(nodes, amounts...), nil, binpack, at)
			var got []string
			for _, place := range places {
				got = append(got, place.Node)
			}
			expect(t, "nodes", tc.want, got)
		})
	}
}

// slots implements ledger.Resources with a number of slots by node. Each pod that isn't bound needs one, if needs doesn't have it.
type slots struct {
	shapesOf
	free  map[string]int
	needs map[gpu.PodUID]int
}

func (s *slots) Fits(q ledger.ResourceQuery) bool {
	need := 0
	for _, uid := range slices.Concat(q.Pods, q.Ahead) {
		if n, known := s.needs[uid]; known {
			need += n
		} else {
			need++
		}
	}
	return need <= s.free[q.Node]
}

// TestReserveAllRandom compares ReserveAll with a second ledger, on which the same pods are placed one by one: each on
// the node that Rank prefers among its candidates with a free slot. A failure changes nothing.
func TestReserveAllRandom(t *testing.T) {
	reached := map[string]int{}
	for seed := range uint64(1000) {
		s := newReserveSimulation(t, seed)
		before := s.ledger.Nodes()
		places, yielded := s.ledger.ReserveAll(s.requests, s.yielding, s.view, at)
		want, wantYielded := s.oneByOne()
		expect(t, "places", want, places)
		expect(t, "yielded sets", wantYielded, yielded)
		if places == nil {
			expect(t, "nodes after a failure", before, s.ledger.Nodes())
		} else {
			expect(t, "nodes", s.reference.Nodes(), s.ledger.Nodes())
		}
		if t.Failed() {
			t.Fatalf("with seed %d", seed)
		}
		several := slices.ContainsFunc(s.requests, func(r ledger.Request) bool { return r.Pod.Cards > 1 })
		reached[fmt.Sprintf("placed %t, some yielded %t, several cards %t", places != nil, yielded > 0, several)]++
	}
	if len(reached) < 6 {
		t.Errorf("only %v", reached)
	}
}

// reserveSimulation is a random cluster, twice, and random requests.
type reserveSimulation struct {
	*testing.T
	ledger, reference *ledger.Ledger
	slots             *slots
	requests          []ledger.Request
	yielding          [][]gpu.PodUID
	view              ledger.View
	// nominee is nominated to the node n0, if it has a UID.
	nominee gpu.Pod
}

func newReserveSimulation(t *testing.T, seed uint64) *reserveSimulation {
	s := &reserveSimulation{T: t}
	random := rand.New(rand.NewPCG(seed, 2))
	policies := placement.Policies()
	s.view = ledger.View{Card: policies[random.IntN(2)], Node: policies[random.IntN(2)]}
	s.randomRequests(seed)
	s.reference = s.ledger
	s.randomRequests(seed)
	return s
}

// randomRequests sets all fields but reference.
func (s *reserveSimulation) randomRequests(seed uint64) {
	random := rand.New(rand.NewPCG(seed, 1))
	memory := func() gpu.Memory { return 1 + gpu.Memory(random.IntN(16)) }
	s.slots, s.requests, s.yielding = &slots{free: map[string]int{}}, nil, nil
	f, nodes := newFixtureWith(s.T, s.slots), make([]string, 2+random.IntN(4))
	for i := range nodes {
		nodes[i] = fmt.Sprint("n", i)
		f.SetNode(nodes[i], limited(spec(16, 8+memory(), 8+memory()), random.IntN(8))) // Mostly with a limit of containers.
		s.slots.free[nodes[i]] = random.IntN(8)
	}
	for i := range random.IntN(4 * len(nodes)) {
		p, node := like(pod(fmt.Sprint("r", i), memory()), random.IntN(6)), nodes[random.IntN(len(nodes))]
		if random.IntN(4) == 0 {
			f.SetBound(node, p, p.Demand().On(random.Perm(3)[:p.NumCards()]...), at)
		} else if _, err := f.Reserve(node, p, placement.Binpack, at); err == nil {
			s.yielding = append(s.yielding, []gpu.PodUID{p.UID})
		}
	}
	if random.IntN(3) == 0 {
		s.nominee = pod("nominee", memory(), int32(random.IntN(3)))
		f.Nominate(nodes[0], s.nominee)
	}
	lists, amounts := [][]string{nodes, slices.Clone(nodes[1:]), {nodes[1], nodes[0]}}, []gpu.Memory{memory(), memory()}
	kinds := []int{random.IntN(6), random.IntN(6)}
	for i := range 1 + random.IntN(3*len(nodes)) {
		p := like(pod(fmt.Sprint("w", i), amounts[random.IntN(2)], int32(random.IntN(2))), kinds[random.IntN(2)])
		s.requests = append(s.requests, ledger.Request{Pod: p, Nodes: lists[random.IntN(len(lists))]})
	}
	if random.IntN(3) == 0 {
		f.await(s.requests[:1+random.IntN(len(s.requests))], 0, longAgo)
	}
	s.ledger = f.Ledger
}

// like returns the pod with one of six kinds of demand: memory of one card, or several cards, cores, containers, or all of these.
func like(pod gpu.Pod, kind int) gpu.Pod {
	if kind == 1 || kind == 5 {
		pod.Cards = 2
		pod.Request *= 2
	}
	if kind == 2 {
		pod.Cards = 3
		pod.Request *= 3
	}
	if kind == 3 || kind == 5 {
		pod.Cores = 30 * gpu.Cores(pod.NumCards())
	}
	if kind == 4 || kind == 5 {
		pod.Containers = 2
	}
	return pod
}

// oneByOne does what ReserveAll does, on the second ledger.
func (s *reserveSimulation) oneByOne() ([]ledger.ChosenNode, int) {
	placed := 0
	for yielded := 0; ; yielded++ {
		if places := s.placeOneByOne(&placed); places != nil {
			return places, yielded
		}
		if yielded == len(s.yielding) {
			return nil, 0
		}
		for _, uid := range s.yielding[yielded] {
			s.reference.Release(uid)
		}
	}
}

func (s *reserveSimulation) placeOneByOne(placed *int) (places []ledger.ChosenNode) {
	for _, request := range s.requests {
		best, most, free := "", placement.Suitability(-1), s.withFreeSlot(request.Pod)
		fitting, _, _ := s.reference.Rank(s.view, request.Pod, request.Nodes)
		for _, c := range fitting {
			if node := request.Nodes[c.Node]; c.Suits > most && slices.Contains(free, node) {
				best, most = node, c.Suits
			}
		}
		if best == "" {
			for i := range places {
				s.reference.Release(s.requests[i].Pod.UID)
			}
			return nil
		}
		if _, err := s.reference.Reserve(best, request.Pod, s.view.Card, at.Add(time.Duration(*placed))); err != nil {
			s.Fatal(err)
		}
		*placed++
		places = append(places, ledger.ChosenNode{Node: best})
	}
	return places
}

// withFreeSlot returns the nodes with a slot for the pod beside the assumed pods and the nominated one.
func (s *reserveSimulation) withFreeSlot(pod gpu.Pod) (names []string) {
	for _, node := range s.reference.Nodes() {
		used := 0
		if node.Name == "n0" && s.nominee.UID != "" && s.nominee.Priority >= pod.Priority {
			used++
		}
		for _, a := range node.Allocations {
			if a.State == ledger.Assumed {
				used++
			}
		}
		if used < s.slots.free[node.Name] {
			names = append(names, node.Name)
		}
	}
	return names
}

// TestFitsWithoutAssumed: node n1 has a card of 16 with 6 bound and 10 assumed, and a card of 8 that is free; n2 has an
// unhealthy card.
func TestFitsWithoutAssumed(t *testing.T) {
	l := newFixture(t, spec(16, 8), unhealthy(0, spec(32)))
	l.SetBound("n1", pod("bound", 6), gpu.On(0, 6), at)
	if places, _ := l.ReserveAll([]ledger.Request{{Pod: pod("assumed", 10), Nodes: []string{"n1"}}}, nil, binpack, at); places == nil {
		t.Fatal("the pod doesn't fit")
	}
	for name, tc := range map[string]struct {
		request gpu.Memory
		nodes   []string
		want    bool
	}{
		"on the free card":                {8, []string{"n1"}, true},
		"in the place of the assumed pod": {10, []string{"n2", "n1"}, true},
		"beside the bound pod only":       {11, []string{"n1"}, false},
		"larger than each card":           {17, []string{"n1"}, false},
		"on an unhealthy card":            {8, []string{"n2"}, false},
		"on an unknown node":              {1, []string{"n3"}, false},
	} {
		if got := l.FitsWithoutAssumed(pod("p", tc.request), tc.nodes); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

package ledger_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// requests returns requests for the amounts, by pods named w0, w1 and so on.
func requests(nodes []string, amounts ...gpu.Memory) (out []ledger.Request) {
	for i, memory := range amounts {
		out = append(out, ledger.Request{Pod: pod(fmt.Sprint("w", i), memory), Nodes: nodes})
	}
	return out
}

// last makes the node the last one that the requests get.
func last(node string, requests []ledger.Request) []ledger.Request {
	for i := range requests {
		requests[i].Last = func(name string) bool { return name == node }
	}
	return requests
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
		"nodes that are left to others, as long as others have room": {
			requests: last("n1", requests(both, 4, 4, 16, 16)), want: on("n2", "n2", "n2", "n1"),
		},
		"a node that is left to others has got room": {
			before:   func(f *fixture) { f.reserve("n1", pod("a1", 8), pod("a2", 8), pod("b1", 16)) },
			requests: last("n1", requests(both, 16, 16, 16)), yielding: [][]gpu.PodUID{{"a1", "a2"}},
			want: on("n2", "n2", "n1"), released: 1, gone: []gpu.PodUID{"a1", "a2"},
		},
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
	f, c := newFixture(t, spec(16), spec(16), spec(16)), newSlots(t, map[string]int{"n1": 1, "n2": 1, "n3": 0})
	f.reserve("n1", pod("w", 16))
	c.Take("n1", "w")
	for _, step := range []struct {
		what string
		to   []string
		want string
		ok   bool
	}{
		{"to another node", []string{"n2"}, "n2", true},
		{"to an unknown node", []string{"n4"}, "", false},
		{"to a node without capacity", []string{"n3"}, "", false},
		{"to its own place", []string{"n3", "n2"}, "n2", true},
	} {
		node, ok := f.Move(ledger.Request{Pod: pod("w", 16), Nodes: step.to}, binpack, c, at)
		expect(t, step.what, []any{step.want, step.ok}, []any{node, ok})
		expect(t, "the pod's node", "n2", f.nodeOf("w"))
		expect(t, "where it takes capacity", map[gpu.PodUID]string{"w": "n2"}, c.taken)
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
			f.Move(ledger.Request{Pod: pod("w", 16), Nodes: []string{"n1"}}, binpack, nil, at)
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

// A node that lacks capacity for one pod can take another one that needs less, and a node that lacks it for both is
// passed by.
func TestReserveAllCapacity(t *testing.T) {
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
			f, c := newFixture(t, spec(16, 16), spec(16, 16), spec(16, 16)), newSlots(t, tc.free)
			amounts := make([]gpu.Memory, len(tc.needs))
			for i, need := range tc.needs {
				amounts[i] = 16
				c.needs[gpu.PodUID(fmt.Sprint("w", i))] = need
			}
			places, _ := f.ReserveAll(requests(nodes, amounts...), nil, binpack, c, at)
			var got []string
			for _, place := range places {
				got = append(got, place.Node)
			}
			expect(t, "nodes", tc.want, got)
			if places == nil {
				expect(t, "free after the failure", tc.free, c.free)
			}
		})
	}
}

// slots is a Capacity with a number of free slots by node. Each pod needs one, if needs doesn't have it.
type slots struct {
	t     *testing.T
	free  map[string]int
	needs map[gpu.PodUID]int
	taken map[gpu.PodUID]string
}

func newSlots(t *testing.T, free map[string]int) *slots {
	return &slots{t, maps.Clone(free), map[gpu.PodUID]int{}, map[gpu.PodUID]string{}}
}

func (s *slots) need(uid gpu.PodUID) int {
	if n, known := s.needs[uid]; known {
		return n
	}
	return 1
}

func (s *slots) Take(node string, uid gpu.PodUID) bool {
	if where, again := s.taken[uid]; again {
		s.t.Errorf("%s is on %s and takes again on %s", uid, where, node)
	}
	if s.free[node] < s.need(uid) {
		return false
	}
	s.free[node] -= s.need(uid)
	s.taken[uid] = node
	return true
}

func (s *slots) Return(node string, uid gpu.PodUID) {
	if s.taken[uid] != node {
		s.t.Errorf("%s returns what it has on %q to %s", uid, s.taken[uid], node)
	}
	s.free[node] += s.need(uid)
	delete(s.taken, uid)
}

// TestReserveAllRandom compares ReserveAll with a second ledger, on which the same pods are placed one by one: each on
// the node that Rank prefers among its candidates with a free slot. A failure changes nothing.
func TestReserveAllRandom(t *testing.T) {
	reached := map[string]int{}
	for seed := range uint64(1000) {
		s := newReserveSimulation(t, seed)
		before, free := s.ledger.Nodes(), maps.Clone(s.slots.free)
		places, yielded := s.ledger.ReserveAll(s.requests, s.yielding, s.view, s.slots, at)
		want, wantYielded := s.oneByOne()
		expect(t, "places", want, places)
		expect(t, "yielded sets", wantYielded, yielded)
		if places == nil {
			expect(t, "nodes after a failure", before, s.ledger.Nodes())
			expect(t, "slots after a failure", free, s.slots.free)
		} else {
			expect(t, "nodes", s.reference.Nodes(), s.ledger.Nodes())
			expect(t, "slots", s.referenceSlots.free, s.slots.free)
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
	ledger, reference     *ledger.Ledger
	slots, referenceSlots *slots
	requests              []ledger.Request
	yielding              [][]gpu.PodUID
	view                  ledger.View
}

func newReserveSimulation(t *testing.T, seed uint64) *reserveSimulation {
	s := &reserveSimulation{}
	random := rand.New(rand.NewPCG(seed, 2))
	policies := placement.Policies()
	s.view = ledger.View{Card: policies[random.IntN(2)], Node: policies[random.IntN(2)]}
	s.ledger, s.slots, s.requests, s.yielding = randomRequests(t, seed)
	s.reference, s.referenceSlots, _, _ = randomRequests(t, seed)
	return s
}

func randomRequests(t *testing.T, seed uint64) (*ledger.Ledger, *slots, []ledger.Request, [][]gpu.PodUID) {
	random := rand.New(rand.NewPCG(seed, 1))
	memory := func() gpu.Memory { return 1 + gpu.Memory(random.IntN(16)) }
	f, free, nodes := newFixture(t), map[string]int{}, make([]string, 2+random.IntN(4))
	for i := range nodes {
		nodes[i] = fmt.Sprint("n", i)
		f.SetNode(nodes[i], limited(spec(16, 8+memory(), 8+memory()), random.IntN(8))) // Mostly with a limit of containers.
		free[nodes[i]] = random.IntN(8)
	}
	c, yielding := newSlots(t, free), [][]gpu.PodUID(nil)
	for i := range random.IntN(4 * len(nodes)) {
		p, node := like(pod(fmt.Sprint("r", i), memory()), random.IntN(6)), nodes[random.IntN(len(nodes))]
		if random.IntN(4) == 0 {
			f.SetBound(node, p, p.Demand().On(random.Perm(3)[:p.NumCards()]...), at)
		} else if _, err := f.Reserve(node, p, placement.Binpack, at); err == nil {
			c.free[node] += c.need(p.UID)
			c.Take(node, p.UID)
			yielding = append(yielding, []gpu.PodUID{p.UID})
		}
	}
	if random.IntN(3) == 0 {
		f.Nominate(nodes[0], pod("nominee", memory(), int32(random.IntN(3))))
	}
	lists, amounts := [][]string{nodes, slices.Clone(nodes[1:]), {nodes[1], nodes[0]}}, []gpu.Memory{memory(), memory()}
	kinds := []int{random.IntN(6), random.IntN(6)}
	var requests []ledger.Request
	for i := range 1 + random.IntN(3*len(nodes)) {
		p := like(pod(fmt.Sprint("w", i), amounts[random.IntN(2)], int32(random.IntN(2))), kinds[random.IntN(2)])
		requests = append(requests, ledger.Request{Pod: p, Nodes: lists[random.IntN(len(lists))]})
	}
	if random.IntN(3) == 0 {
		f.await(requests[:1+random.IntN(len(requests))], 0, longAgo)
	}
	return f.Ledger, c, requests, yielding
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
			node, _, _ := s.reference.Lookup(uid)
			s.reference.Release(uid)
			s.referenceSlots.Return(node, uid)
		}
	}
}

func (s *reserveSimulation) placeOneByOne(placed *int) (places []ledger.ChosenNode) {
	for _, request := range s.requests {
		best, most := "", placement.Suitability(-1)
		s.reference.Rank(s.view, request.Pod, request.Nodes, func(i int, suits placement.Suitability, reason reasons.Reason) {
			node := request.Nodes[i]
			if reason == reasons.Fits && suits > most && s.referenceSlots.free[node] >= s.referenceSlots.need(request.Pod.UID) {
				best, most = node, suits
			}
		})
		if best == "" {
			for i, place := range places {
				s.reference.Release(s.requests[i].Pod.UID)
				s.referenceSlots.Return(place.Node, s.requests[i].Pod.UID)
			}
			return nil
		}
		if _, err := s.reference.Reserve(best, request.Pod, s.view.Card, at.Add(time.Duration(*placed))); err != nil {
			s.slots.t.Fatal(err)
		}
		s.referenceSlots.Take(best, request.Pod.UID)
		*placed++
		places = append(places, ledger.ChosenNode{Node: best})
	}
	return places
}

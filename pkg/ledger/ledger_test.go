package ledger_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// at is the assume time of all allocations in these tests.
var at = time.Unix(1700000000, 0)

// spec returns a node with cards of these sizes.
func spec(sizes ...gpu.Memory) ledger.NodeSpec {
	s := ledger.NodeSpec{Unit: gpu.MiB}
	for i, size := range sizes {
		s.Cards = append(s.Cards, gpu.Card{Index: i, UUID: fmt.Sprintf("GPU-%d", i), Memory: size, NUMANode: gpu.NoNUMANode})
	}
	return s
}

// unhealthy returns the node with its first card unhealthy.
func unhealthy(s ledger.NodeSpec) ledger.NodeSpec {
	s.Cards = slices.Clone(s.Cards)
	s.Cards[0].Unhealthy = "Xid 79"
	return s
}

// pod returns a pod whose UID contains its name.
func pod(name string, request gpu.Memory) gpu.Pod {
	return gpu.Pod{UID: gpu.PodUID("uid-" + name), Namespace: "default", Name: name, Request: request}
}

// recorder is a ledger that records its calls of freed.
type recorder struct {
	*ledger.Ledger
	t     *testing.T
	freed []string
}

func newRecorder(t *testing.T) *recorder {
	b := &recorder{t: t}
	b.Ledger = ledger.New()
	b.Ledger.AddFreedListener(func(node string) { b.freed = append(b.freed, node) })
	return b
}

// takeFreed returns the nodes of the freed calls since the last takeFreed.
func (b *recorder) takeFreed() []string {
	freed := b.freed
	b.freed = nil
	return freed
}

// reserve reserves with binpack and fails the test on an error.
func (b *recorder) reserve(node string, pod gpu.Pod) gpu.Placement {
	b.t.Helper()
	allocation, err := b.Reserve(node, pod, placement.Binpack, at)
	if err != nil {
		b.t.Fatalf("Reserve(%s, %s): %v", node, pod, err)
	}
	return allocation.Placement
}

func (b *recorder) used(node string) []gpu.Memory {
	n, _ := b.Node(node)
	return n.Used
}

func (b *recorder) where(pod gpu.Pod) gpu.Placement {
	_, allocation, _ := b.Lookup(pod.UID)
	return allocation.Placement
}

func (b *recorder) check(pod gpu.Pod, names ...string) map[string]placement.Reason {
	reasons := map[string]placement.Reason{}
	b.Check(pod, names, func(name string, reason placement.Reason) { reasons[name] = reason })
	return reasons
}

// rank returns the same as check, from Rank, which uses per-node summaries of the cards.
func (b *recorder) rank(pod gpu.Pod, names ...string) map[string]placement.Reason {
	reasons := map[string]placement.Reason{}
	view := ledger.View{Card: placement.Binpack, Node: placement.Binpack}
	b.Rank(view, pod, names, func(i int, _ placement.Suitability, reason placement.Reason) { reasons[names[i]] = reason })
	return reasons
}

func expect(t *testing.T, what string, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// TestFilterFigure is the filter figure of the gpushare design.
func TestFilterFigure(t *testing.T) {
	b := newRecorder(t)
	for _, node := range []string{"n1", "n2", "n3"} {
		b.SetNode(node, spec(16276, 16276))
	}
	b.SetBound("n1", pod("a", 16276), gpu.On(0, 16276), at)
	b.SetBound("n1", pod("b", 12207), gpu.On(1, 12207), at)
	b.SetBound("n2", pod("c", 12207), gpu.On(0, 12207), at)
	b.SetBound("n2", pod("d", 12207), gpu.On(1, 12207), at)
	b.SetBound("n3", pod("e", 8138), gpu.On(0, 8138), at)
	b.SetBound("n3", pod("f", 16276), gpu.On(1, 16276), at)

	asking := pod("asking", 8138)
	expect(t, "Check", map[string]placement.Reason{
		"n1": placement.Full, "n2": placement.Fragmented, "n3": placement.Fits, "n4": placement.NotShared,
	}, b.check(asking, "n1", "n2", "n3", "n4"))
	_, err := b.Reserve("n2", asking, placement.Binpack, at)
	expect(t, "Reserve on n2", "node n2: no GPU card has enough free memory, though the node's cards together have", fmt.Sprint(err))
	expect(t, "the card on n3", gpu.On(0, 8138), b.reserve("n3", asking))
	expect(t, "n3", []gpu.Memory{16276, 16276}, b.used("n3"))
}

// TestBindFigure is the bind figure of the gpushare design.
func TestBindFigure(t *testing.T) {
	b := newRecorder(t)
	b.SetNode("n1", spec(16276, 16276, 16276, 16276))
	b.SetBound("n1", pod("a", 4069), gpu.On(0, 4069), at)
	b.SetBound("n1", pod("b", 8138), gpu.On(1, 8138), at)
	b.SetBound("n1", pod("c", 12207), gpu.On(2, 12207), at)

	expect(t, "the card", gpu.On(1, 8138), b.reserve("n1", pod("asking", 8138)))
	expect(t, "the node", []gpu.Memory{4069, 16276, 12207, 0}, b.used("n1"))
}

// Each row runs on a ledger with one node n1 with two cards of 16.
func TestLedger(t *testing.T) {
	a, c := pod("a", 10), pod("c", 10)
	for name, tc := range map[string]struct {
		run  func(b *recorder)
		used []gpu.Memory
		// freed are the nodes of the freed calls during the row.
		freed []string
		// node and allocation are the result of Lookup for pod a.
		node       string
		allocation ledger.Allocation
	}{
		"a reservation allocates its memory": {
			run:  func(b *recorder) { b.reserve("n1", a) },
			used: []gpu.Memory{10, 0},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Assumed, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"a second reservation changes nothing, not even the assume time": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				allocation, err := b.Reserve("n1", a, placement.Spread, at.Add(time.Hour))
				expect(b.t, "the second answer", ledger.Allocation{Pod: a, Placement: gpu.On(0, 10), AssumeTime: at}, allocation)
				expect(b.t, "its error", nil, err)
			},
			used: []gpu.Memory{10, 0},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Assumed, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"a confirmed reservation can't be released": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				expect(b.t, "Commit", true, b.Confirm(a.UID))
				expect(b.t, "Release", false, b.Release(a.UID))
			},
			used: []gpu.Memory{10, 0},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Bound, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"a reservation can be released once": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				expect(b.t, "Release", true, b.Release(a.UID))
				expect(b.t, "Release again", false, b.Release(a.UID))
			},
			used: []gpu.Memory{0, 0}, freed: []string{"n1"},
		},
		"a pod deleted during its bind isn't confirmed": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				expect(b.t, "Drop", true, b.Remove(a.UID))
				expect(b.t, "Commit", false, b.Confirm(a.UID))
			},
			used: []gpu.Memory{0, 0}, freed: []string{"n1"},
		},
		"the pod's event confirms the reservation and frees nothing": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				b.SetBound("n1", a, gpu.On(0, 10), at)
				expect(b.t, "Commit", true, b.Confirm(a.UID))
			},
			used: []gpu.Memory{10, 0},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Bound, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"the card in the pod's event replaces the reserved card": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				b.SetBound("n1", a, gpu.On(1, 10), at)
			},
			used: []gpu.Memory{0, 10}, freed: []string{"n1"},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Bound, Placement: gpu.On(1, 10), AssumeTime: at},
		},
		"the node in the pod's event replaces the reserved node": {
			run: func(b *recorder) {
				b.SetNode("n2", spec(16))
				b.takeFreed()
				b.reserve("n1", a)
				b.SetBound("n2", a, gpu.On(0, 10), at)
				expect(b.t, "n2", []gpu.Memory{10}, b.used("n2"))
			},
			used: []gpu.Memory{0, 0}, freed: []string{"n1"},
			node: "n2", allocation: ledger.Allocation{Pod: a, State: ledger.Bound, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"a pod with an allocation on one node gets none on another": {
			run: func(b *recorder) {
				b.SetNode("n2", spec(16))
				b.takeFreed()
				b.reserve("n1", a)
				_, err := b.Reserve("n2", a, placement.Binpack, at)
				expect(b.t, "Reserve", "node n2: an earlier bind of this pod to another node is unconfirmed", fmt.Sprint(err))
				expect(b.t, "Check", map[string]placement.Reason{"n1": placement.Fits, "n2": placement.Elsewhere}, b.check(a, "n1", "n2"))
			},
			used: []gpu.Memory{10, 0},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Assumed, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"a pod with an allocation fits its full node": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				b.reserve("n1", c)
				expect(b.t, "its own", map[string]placement.Reason{"n1": placement.Fits}, b.check(a, "n1"))
				expect(b.t, "another's", map[string]placement.Reason{"n1": placement.Fragmented}, b.check(pod("d", 10), "n1"))
			},
			used: []gpu.Memory{10, 10},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Assumed, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"an overcommitted card has no room after the excess is removed": {
			run: func(b *recorder) {
				b.SetBound("n1", a, gpu.On(0, 10), at)
				b.SetBound("n1", c, gpu.On(0, 10), at)
				b.SetBound("n1", pod("d", 16), gpu.On(0, 16), at)
				b.Remove(c.UID)
			},
			used: []gpu.Memory{26, 0},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Bound, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"a pod on several cards has all its shares": {
			run:  func(b *recorder) { b.SetBound("n1", a, gpu.Placement{{Card: 0, Memory: 4}, {Card: 1, Memory: 6}}, at) },
			used: []gpu.Memory{4, 6},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Bound, Placement: gpu.Placement{{Card: 0, Memory: 4}, {Card: 1, Memory: 6}}, AssumeTime: at},
		},
		"an allocation on a missing card stays listed and counts again when the card is back": {
			run: func(b *recorder) {
				b.SetBound("n1", a, gpu.On(1, 10), at)
				b.SetNode("n1", spec(16))
				expect(b.t, "without card 1", []gpu.Memory{0}, b.used("n1"))
				expect(b.t, "a", gpu.On(1, 10), b.where(a))
				b.SetNode("n1", spec(16, 16))
			},
			used: []gpu.Memory{0, 10}, freed: []string{"n1"},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Bound, Placement: gpu.On(1, 10), AssumeTime: at},
		},
		"a node that is deleted and created again keeps its allocations": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				b.DeleteNode("n1")
				expect(b.t, "Check without the node", map[string]placement.Reason{"n1": placement.NotShared}, b.check(c, "n1"))
				n, known := b.Node("n1")
				expect(b.t, "unit without the node", gpu.Unit(0), n.Unit)
				expect(b.t, "known by its allocation", true, known)
				b.SetNode("n1", spec(16, 16))
			},
			used: []gpu.Memory{10, 0}, freed: []string{"n1"},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Assumed, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"a deleted node is removed with its last allocation": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				b.DeleteNode("n1")
				b.Remove(a.UID)
				_, known := b.Node("n1")
				expect(b.t, "known", false, known)
			},
		},
		"a node without an object yet keeps its allocations": {
			run: func(b *recorder) {
				b.DeleteNode("n1")
				b.SetBound("n1", a, gpu.On(0, 10), at)
				b.SetNode("n1", spec(16, 16))
			},
			used: []gpu.Memory{10, 0}, freed: []string{"n1"},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Bound, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"a node that allocates whole cards gets no new pods and keeps its allocations": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				whole := spec(16, 16)
				whole.WholeCards = true
				b.SetNode("n1", whole)
				_, err := b.Reserve("n1", c, placement.Binpack, at)
				var rejected *ledger.NoRoomError
				if !errors.As(err, &rejected) || !errors.Is(err, ledger.ErrNoRoom) {
					b.t.Fatalf("Reserve: got %v, want a NoRoomError", err)
				}
				expect(b.t, "error", ledger.NoRoomError{Node: "n1", Reason: placement.WholeCards}, *rejected)
				expect(b.t, "Check", map[string]placement.Reason{"n1": placement.WholeCards}, b.check(c, "n1"))
			},
			used: []gpu.Memory{10, 0},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Assumed, Placement: gpu.On(0, 10), AssumeTime: at},
		},
		"a node that stops allocating whole cards is freed": {
			run: func(b *recorder) {
				whole := spec(16, 16)
				whole.WholeCards = true
				b.SetNode("n1", whole)
				b.SetNode("n1", spec(16, 16))
			},
			used: []gpu.Memory{0, 0}, freed: []string{"n1"},
		},
		"a card that becomes unhealthy frees nothing; one that recovers is freed": {
			run: func(b *recorder) {
				b.SetNode("n1", unhealthy(spec(16, 16)))
				expect(b.t, "unhealthy", []string(nil), b.takeFreed())
				expect(b.t, "the next card", gpu.On(1, 10), b.reserve("n1", a))
				b.SetNode("n1", spec(16, 16))
			},
			used: []gpu.Memory{0, 10}, freed: []string{"n1"},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Assumed, Placement: gpu.On(1, 10), AssumeTime: at},
		},
		"a pod removed from an unhealthy card frees nothing": {
			run: func(b *recorder) {
				b.reserve("n1", a)
				b.SetNode("n1", unhealthy(spec(16, 16)))
				b.Remove(a.UID)
			},
			used: []gpu.Memory{0, 0},
		},
		"a larger card is freed": {
			run:  func(b *recorder) { b.SetNode("n1", spec(16, 17)) },
			used: []gpu.Memory{0, 0}, freed: []string{"n1"},
		},
		"a smaller card frees nothing": {
			run:  func(b *recorder) { b.SetNode("n1", spec(16, 15)) },
			used: []gpu.Memory{0, 0},
		},
		"an unchanged node frees nothing": {
			run:  func(b *recorder) { b.SetNode("n1", spec(16, 16)) },
			used: []gpu.Memory{0, 0},
		},
		"a card with a new index is freed": {
			run: func(b *recorder) {
				swapped := spec(16, 16)
				swapped.Cards[1].Index = 4
				b.SetNode("n1", swapped)
			},
			used: []gpu.Memory{0, 0}, freed: []string{"n1"},
		},
		"cards are identified by index in any order": {
			run: func(b *recorder) {
				s := spec(16, 8)
				slices.Reverse(s.Cards)
				b.SetNode("n1", s)
				n, _ := b.Node("n1")
				expect(b.t, "the cards", spec(16, 8).Cards, n.Cards)
				b.reserve("n1", a)
			},
			used: []gpu.Memory{10, 0},
			node: "n1", allocation: ledger.Allocation{Pod: a, State: ledger.Assumed, Placement: gpu.On(0, 10), AssumeTime: at},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newRecorder(t)
			b.SetNode("n1", spec(16, 16))
			expect(t, "freed by a new node", []string{"n1"}, b.takeFreed())
			tc.run(b)
			expect(t, "used", tc.used, b.used("n1"))
			expect(t, "freed", tc.freed, b.takeFreed())
			node, allocation, _ := b.Lookup(a.UID)
			expect(t, "a's node", tc.node, node)
			expect(t, "a", tc.allocation, allocation)
		})
	}
}

func TestPresumedAllocation(t *testing.T) {
	a, c, d := pod("a", 8), pod("c", 8), pod("d", 6)
	for name, tc := range map[string]struct {
		run  func(b *recorder)
		used []gpu.Memory
		// where is the placement of pod a, and presumed whether it is presumed.
		where    gpu.Placement
		presumed bool
	}{
		"a pod without a card is presumed on the card that binpack chooses": {
			run:  func(b *recorder) { b.SetBound("n1", a, nil, at) },
			used: []gpu.Memory{8, 0}, where: gpu.On(0, 8), presumed: true,
		},
		"a presumed allocation stays when binpack would prefer another card": {
			run: func(b *recorder) {
				b.SetBound("n1", a, nil, at)
				b.SetBound("n1", c, gpu.On(1, 8), at) // Binpack would now prefer this card for a, too.
			},
			used: []gpu.Memory{8, 8}, where: gpu.On(0, 8), presumed: true,
		},
		"a presumed allocation stays after another event without a card": {
			run: func(b *recorder) {
				b.SetBound("n1", a, nil, at)
				b.SetBound("n1", c, gpu.On(1, 8), at)
				b.SetBound("n1", a, nil, at)
			},
			used: []gpu.Memory{8, 8}, where: gpu.On(0, 8), presumed: true,
		},
		"a reservation doesn't move a presumed allocation": {
			run: func(b *recorder) {
				b.SetBound("n1", a, nil, at)
				expect(b.t, "c", gpu.On(1, 8), b.reserve("n1", c))
			},
			used: []gpu.Memory{8, 8}, where: gpu.On(0, 8), presumed: true,
		},
		"a presumed allocation moves if another pod's event names its card": {
			run: func(b *recorder) {
				b.SetBound("n1", a, nil, at)
				b.SetBound("n1", c, gpu.On(0, 8), at)
			},
			used: []gpu.Memory{8, 8}, where: gpu.On(1, 8), presumed: true,
		},
		"the pod's own event replaces a presumed allocation": {
			run: func(b *recorder) {
				b.SetBound("n1", a, nil, at)
				b.SetBound("n1", a, gpu.On(1, 8), at)
			},
			used: []gpu.Memory{0, 8}, where: gpu.On(1, 8),
		},
		"a pod whose annotations were removed is presumed on its former card": {
			run: func(b *recorder) {
				b.SetBound("n1", a, gpu.On(1, 8), at)
				b.SetBound("n1", a, nil, at)
			},
			used: []gpu.Memory{0, 8}, where: gpu.On(1, 8), presumed: true,
		},
		"a presumed allocation stays on a card that becomes unhealthy": {
			run: func(b *recorder) {
				b.SetBound("n1", a, nil, at)
				b.SetNode("n1", unhealthy(spec(10, 10)))
			},
			used: []gpu.Memory{8, 0}, where: gpu.On(0, 8), presumed: true,
		},
		"a new presumed allocation avoids an unhealthy card": {
			run: func(b *recorder) {
				b.SetNode("n1", unhealthy(spec(10, 10)))
				b.SetBound("n1", a, nil, at)
			},
			used: []gpu.Memory{0, 8}, where: gpu.On(1, 8), presumed: true,
		},
		"a presumed allocation moves from a card that becomes too small": {
			run: func(b *recorder) {
				b.SetBound("n1", a, nil, at)
				b.SetNode("n1", spec(7, 10))
			},
			used: []gpu.Memory{0, 8}, where: gpu.On(1, 8), presumed: true,
		},
		"a pod that fits no card has no placement until memory is freed": {
			run: func(b *recorder) {
				b.SetBound("n1", c, gpu.On(0, 8), at)
				b.SetBound("n1", d, gpu.On(1, 6), at)
				b.SetBound("n1", a, nil, at)
				expect(b.t, "before that", gpu.Placement(nil), b.where(a))
				b.takeFreed()
				b.Remove(c.UID)
				expect(b.t, "freed, although the presumed allocation takes all of it", []string(nil), b.takeFreed())
			},
			used: []gpu.Memory{8, 6}, where: gpu.On(0, 8), presumed: true,
		},
		"pods bound before their node is known are presumed when it is": {
			run: func(b *recorder) {
				b.DeleteNode("n1")
				b.SetBound("n1", c, nil, at)
				b.SetBound("n1", a, nil, at)
				b.SetNode("n1", spec(10, 10))
			},
			used: []gpu.Memory{8, 8}, where: gpu.On(0, 8), presumed: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newRecorder(t)
			b.SetNode("n1", spec(10, 10))
			tc.run(b)
			expect(t, "used", tc.used, b.used("n1"))
			_, allocation, _ := b.Lookup(a.UID)
			expect(t, "a", ledger.Allocation{Pod: a, State: ledger.Bound, Placement: tc.where, Presumed: tc.presumed, AssumeTime: at}, allocation)
		})
	}
}

func TestReadersGetCopies(t *testing.T) {
	b := newRecorder(t)
	nodeSpec := spec(16, 16)
	b.SetNode("n1", nodeSpec)
	nodeSpec.Cards[0].Memory = 1
	where := gpu.On(0, 10)
	b.SetBound("n1", pod("a", 10), where, at)
	where[0].Card = 1
	want := []ledger.Node{{
		Name: "n1", NodeSpec: spec(16, 16), Used: []gpu.Memory{10, 0},
		Allocations: []ledger.Allocation{{Pod: pod("a", 10), State: ledger.Bound, Placement: gpu.On(0, 10), AssumeTime: at}},
	}}

	n, _ := b.Node("n1")
	n.Cards[0].Memory, n.Used[0], n.Allocations[0].Placement[0].Card = 1, 0, 1
	_, allocation, _ := b.Lookup("uid-a")
	allocation.Placement[0].Memory = 1
	again, err := b.Reserve("n1", pod("a", 10), placement.Binpack, at)
	if err != nil {
		t.Fatal(err)
	}
	again.Placement[0].Memory = 1

	expect(t, "the ledger", want, b.Nodes())
	expect(t, "used", []gpu.Memory{10, 0}, b.used("n1"))
}

func TestCard(t *testing.T) {
	b := newRecorder(t)
	b.SetNode("n1", spec(16, 8))
	card, unit, ok := b.Card("n1", 1)
	expect(t, "the card", spec(16, 8).Cards[1], card)
	expect(t, "the unit", gpu.MiB, unit)
	expect(t, "known", true, ok)
	for node, index := range map[string]int{"n1": 2, "n2": 0} {
		card, unit, ok := b.Card(node, index)
		expect(t, "no card", gpu.Card{}, card)
		expect(t, "no unit", gpu.Unit(0), unit)
		expect(t, "known", false, ok)
	}
}

func TestRankScores(t *testing.T) {
	b := newRecorder(t)
	b.SetNode("empty", spec(16, 16))
	b.SetNode("half", spec(16, 16))
	b.SetNode("full", spec(16))
	b.SetNode("whole", ledger.NodeSpec{Cards: spec(16).Cards, WholeCards: true})
	b.SetBound("half", pod("a", 8), gpu.On(0, 8), at)
	b.SetBound("full", pod("c", 16), gpu.On(0, 16), at)

	names := []string{"empty", "half", "full", "whole", "unknown"}
	expect(t, "binpack", []int{4, 9, 0, 0, 0}, scores(b.Ledger, placement.Binpack, pod("d", 8), names))
	expect(t, "spread", []int{5, 5, 0, 0, 0}, scores(b.Ledger, placement.Spread, pod("d", 8), names))
	expect(t, "pod with an allocation", []int{0, 10, 0, 0, 0}, scores(b.Ledger, placement.Binpack, pod("a", 8), names))
}

func scores(l *ledger.Ledger, policy placement.Policy, pod gpu.Pod, names []string) []int {
	out := make([]int, len(names))
	l.Rank(ledger.View{Card: policy, Node: policy}, pod, names, func(i int, suits placement.Suitability, _ placement.Reason) { out[i] = suits.Score() })
	return out
}

// Rank and Check return the same reasons.
func TestRankAgreesWithCheck(t *testing.T) {
	l, names := cluster(20)
	names = append(names, "unknown")
	l.SetNode("whole", ledger.NodeSpec{Cards: spec(16).Cards, WholeCards: true})
	names = append(names, "whole")
	l.Nominate(names[3], pod("nominee", 1500))
	for _, asking := range []gpu.Pod{pod("asking", 1500), pod("large", 2000), pod("too large", 20000), pod(names[0]+"-0-0", 2050)} {
		var checked, ranked []placement.Reason
		l.Check(asking, names, func(_ string, r placement.Reason) { checked = append(checked, r) })
		l.Rank(ledger.View{Card: placement.Binpack, Node: placement.Spread}, asking, names, func(_ int, _ placement.Suitability, r placement.Reason) {
			ranked = append(ranked, r)
		})
		expect(t, asking.Name, checked, ranked)
	}
}

func TestFreedNil(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", spec(16))
	l.SetBound("n1", pod("a", 10), nil, at)
	if !l.Remove("uid-a") {
		t.Error("the pod had no allocation")
	}
}

// The freed callback can call the ledger: it is called without the lock.
func TestFreedCallsLedger(t *testing.T) {
	var seen []gpu.Memory
	var l *ledger.Ledger
	l = ledger.New()
	l.AddFreedListener(func(name string) {
		n, _ := l.Node(name)
		seen = append(seen, n.Used...)
		l.Remove("uid-unknown") // A write, too.
	})
	l.SetNode("n1", spec(16))
	l.SetBound("n1", pod("a", 10), gpu.On(0, 10), at)
	l.Remove("uid-a")
	expect(t, "used, as seen by the callback", []gpu.Memory{0, 0}, seen)
}

func TestStateString(t *testing.T) {
	expect(t, "State", "assumed", ledger.Assumed.String())
	expect(t, "bound", "bound", ledger.Bound.String())
}

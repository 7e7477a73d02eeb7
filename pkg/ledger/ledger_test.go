package ledger_test

import (
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// What Reserve, Release, Remove, SetBound, SetNode, DeleteNode, ForEachFit and the readers do is defined by the model of
// TestSimulation. The tests here show what the model doesn't have.

func TestNoRoomError(t *testing.T) {
	f := newFixture(t, spec(16, 16))
	f.reserve("n1", pod("a", 10), pod("b", 10))
	_, err := f.Reserve("n1", pod("c", 8), placement.Binpack, at)
	if _, is := errors.AsType[*ledger.NoRoomError](err); !is {
		t.Fatalf("got %v, want a NoRoomError", err)
	}
	expect(t, "text", "node n1: no GPU card has enough free memory, though the node's cards together have", err.Error())
}

func TestReadersGetCopies(t *testing.T) {
	nodeSpec, where := spec(16, 16), gpu.On(0, 10)
	f := newFixture(t, nodeSpec)
	f.SetBound("n1", pod("a", 10), where, at)
	want := f.Nodes()

	nodeSpec.Cards[0].Memory, where[0].Card = 1, 1
	n, _ := f.Node("n1")
	n.Cards[0].Memory, n.Used[0], n.Allocations[0].Placement[0].Card = 1, 0, 1
	_, allocation, _ := f.Lookup("a")
	allocation.Placement[0].Memory = 1
	again, err := f.Reserve("n1", pod("a", 10), placement.Binpack, at)
	check.Must(t, err)
	again.Placement[0].Memory = 1
	available, _ := f.Availability("n1", pod("x", 1), nil)
	available.Cards[0].Used, available.Allocations[0].Placement[0].Memory = 1, 1
	f.NodeCards()[0].Cards[0].Used = 1

	expect(t, "the ledger", want, f.Nodes())
	f.DeleteNode("n1") // It would block if a reader kept the lock.
	expect(t, "the card", "card 0", want[0].Allocations[0].Placement.String())
}

// NodeCards has what pods hold in sum, also on cards that don't exist, and what pods that leave or are nominated will change.
func TestNodeCards(t *testing.T) {
	leaving, first, second := pod("leaving", 6), pod("first", 5), pod("second", 4)
	leaving.Leaving, first.Priority = true, 1
	f := newFixture(t, spec(8, 8), ledger.NodeSpec{})
	f.bind("n1", 0, leaving)
	f.bind("n1", 1, pod("a", 4))
	f.bind("n1", 7, pod("gone", 3))
	f.reserve("n1", pod("assumed", 2))
	expect(t, "the sum of the requests, with the assumed one", 15, int(f.NodeCards()[0].Requested))
	f.Nominate("n1", second)
	f.Nominate("n1", first)
	f.Nominate("n1", pod("bound", 1))
	want := []ledger.NodeCards{{
		Name: "n1", Unit: gpu.MiB, Cards: []placement.Card{{Index: 0, Memory: 8, Used: 8, Containers: 2}, {Index: 1, Memory: 8, Used: 5, Containers: 2}}, Requested: 16,
		Leaving: []ledger.Allocation{{Pod: leaving, State: ledger.Bound, Placement: gpu.On(0, 6), AssumeTime: at}},
		// The first one gets the card of the pod that leaves, and the second one finds none.
		Nominees: []ledger.Place{{Pod: first, Node: "n1", On: gpu.On(0, 5)}, {Pod: second, Node: "n1"}},
	}}
	f.bind("n1", 1, pod("bound", 1))
	expect(t, "nodes", want, f.NodeCards())
}

func TestRankScores(t *testing.T) {
	f := newFixture(t, spec(16, 16), spec(16, 16), spec(16), wholeCards(spec(16)))
	f.bind("n2", 0, pod("half", 8))
	f.bind("n3", 0, pod("full", 16))
	names := []string{"n1", "n2", "n3", "n4", "unknown"}
	expect(t, "binpack", []int{4, 9, 0, 0, 0}, f.scores(placement.Binpack, pod("x", 8), names...))
	expect(t, "spread", []int{5, 5, 0, 0, 0}, f.scores(placement.Spread, pod("x", 8), names...))
	expect(t, "a pod with an allocation", []int{0, 10, 0, 0, 0}, f.scores(placement.Binpack, pod("half", 8), names...))
}

// The freed callback is called without the lock: it can call the ledger.
func TestFreedCallsLedger(t *testing.T) {
	var seen []gpu.Memory
	l := ledger.New()
	l.AddFreedListener(func(name string) {
		n, _ := l.Node(name)
		seen = append(seen, n.Used...)
		l.Remove("unknown") // A write, too.
	})
	l.SetNode("n1", spec(16))
	l.SetBound("n1", pod("a", 10), gpu.On(0, 10), at)
	l.Remove("a")
	expect(t, "used, as seen by the callback", []gpu.Memory{0, 0}, seen)
}

func TestStateString(t *testing.T) {
	expect(t, "states", "assumed bound", ledger.Assumed.String()+" "+ledger.Bound.String())
}

// A node with an old device plugin gives a pod that names no card memory of one card, whatever the pod's label and cores. The memory
// counts there.
func TestPresumedOnOldNode(t *testing.T) {
	old := spec(16, 16)
	old.SeveralCards, old.Cores = reasons.OldForCards, reasons.OldForCores
	f := newFixture(t, old)
	several := pod("several", 12)
	several.Cards, several.Cores = 2, 160
	f.SetBound("n1", several, nil, at)
	node, _ := f.Node("n1")
	expect(t, "used", []gpu.Memory{12, 0}, node.Used)
	expect(t, "used cores", []gpu.Cores{0, 0}, node.UsedCores)
}

// TestNodeMemory: what is free on an unhealthy card is of no use, what pods have there counts.
func TestNodeMemory(t *testing.T) {
	l := ledger.New()
	l.SetNode("n1", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Index: 0, Memory: 16}, {Index: 1, Memory: 16, Unhealthy: "Xid 79"}}})
	l.SetBound("n1", gpu.Pod{UID: "a", Name: "a", Request: 6}, gpu.On(1, 6), time.Unix(1, 0))
	if got, want := l.NodeMemory(), map[string]gpu.Memory{"n1": 22}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

package ledger_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

const (
	workers = 8
	rounds  = 400
)

// concurrently calls work in several goroutines, each with its own random numbers, while another goroutine audits all nodes
// repeatedly.
func concurrently(t *testing.T, l *ledger.Ledger, work func(random *rand.Rand, worker int), audit func(ledger.Node) error) {
	t.Helper()
	var working, auditing sync.WaitGroup
	var done atomic.Bool
	auditing.Go(func() {
		for last := false; !last; {
			last = done.Load()
			for _, n := range l.Nodes() {
				if err := audit(n); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	for worker := range workers {
		working.Go(func() { work(rand.New(rand.NewPCG(uint64(worker), rand.Uint64())), worker) })
	}
	working.Wait()
	done.Store(true)
	auditing.Wait()
}

func pods(prefix string, n int) (pods []gpu.Pod) {
	for i := range n {
		pods = append(pods, pod(fmt.Sprintf("%s-%d", prefix, i), gpu.Memory(1+i%10)))
	}
	return pods
}

// checkSums checks that the used memory of each card is the sum of its allocations.
func checkSums(n ledger.Node) error {
	sums := map[int]gpu.Memory{}
	for _, h := range n.Allocations {
		for _, share := range h.Placement {
			sums[share.Card] += share.Memory
		}
	}
	for i, c := range n.Cards {
		if n.Used[i] != sums[c.Index] {
			return fmt.Errorf("node %s: %d of card %d are used, its allocations have %d", n.Name, n.Used[i], c.Index, sums[c.Index])
		}
	}
	return nil
}

// Concurrent reservations never allocate more of a card than it has, the ledger calls freed exactly once for each removed
// allocation, and a reader that follows the changes ends with the same state.
func TestConcurrentReserve(t *testing.T) {
	var freed, removed, rejected atomic.Int64
	l, reader := ledger.New(), &follower{}
	l.AddFreedListener(func(string) { freed.Add(1) })
	nodes := []string{"n0", "n1", "n2"}
	for _, node := range nodes {
		l.SetNode(node, spec(16, 16, 12))
	}
	freed.Store(0)
	concurrently(t, l, func(random *rand.Rand, worker int) {
		own := pods(fmt.Sprint(worker), 12)
		for range rounds {
			p, node := own[random.IntN(len(own))], nodes[random.IntN(len(nodes))]
			switch random.IntN(5) {
			case 0, 1, 2:
				got, err := l.Reserve(node, p, placement.Policies()[random.IntN(2)], at)
				if err != nil {
					rejected.Add(1)
				} else if where, found, held := l.Lookup(p.UID); !held || where != node || !found.Placement.Equal(got.Placement) {
					t.Errorf("Reserve: %s has %s of %s, Lookup: %s of %q", p, got.Placement, node, found.Placement, where)
				}
			case 3:
				if home, a, ok := l.Lookup(p.UID); ok {
					l.SetBound(home, p, a.Placement, at)
					if l.Release(p.UID) {
						t.Errorf("%s was released after it was bound", p)
					}
				}
			case 4:
				if l.Release(p.UID) || l.Remove(p.UID) {
					removed.Add(1)
				}
			}
		}
	}, func(n ledger.Node) error {
		reader.follow(l)
		for i, c := range n.Cards {
			if n.Used[i] > c.Memory {
				return fmt.Errorf("node %s: %d of card %d are used, it has %d", n.Name, n.Used[i], c.Index, c.Memory)
			}
		}
		return checkSums(n)
	})
	if freed.Load() != removed.Load() || removed.Load() == 0 || rejected.Load() == 0 {
		t.Errorf("freed was called %d times, allocations were removed %d times; %d reservations were rejected",
			freed.Load(), removed.Load(), rejected.Load())
	}
	got, _ := reader.follow(l)
	expect(t, "the reader's copy", l.Nodes(), got)
}

// Concurrent operations on the same pods and nodes: a retried bind during the pod's event, a deletion between the two, nodes
// that are deleted and created again. The used memory is always the sum of the allocations, a pod has at most one
// allocation, and none is left at the end.
func TestConcurrentOperations(t *testing.T) {
	l, nodes, shared := ledger.New(), []string{"n0", "n1", "n2"}, pods("shared", 6)
	specs := []ledger.NodeSpec{spec(16, 16), spec(16, 16, 12), spec(8), unhealthy(0, spec(16, 16)), wholeCards(spec(16))}
	// Checked between bursts: while a pod moves, reading the nodes one after the other can return it on both.
	for range 40 {
		concurrently(t, l, func(random *rand.Rand, _ int) {
			for range rounds / 40 {
				p, node := shared[random.IntN(len(shared))], nodes[random.IntN(len(nodes))]
				switch random.IntN(12) {
				case 0, 1, 2:
					_, _ = l.Reserve(node, p, placement.Binpack, at) // An error for a full node is expected.
				case 3:
					l.Release(p.UID)
				case 4:
					l.SetBound(node, p, gpu.On(random.IntN(3), p.Request), at)
				case 5:
					l.SetBound(node, p, nil, at)
				case 6:
					l.Remove(p.UID)
				case 7:
					l.SetNode(node, specs[random.IntN(len(specs))])
				case 8:
					l.DeleteNode(node)
					l.ForEachFit(p, nodes, func(string, reasons.Reason) {})
					l.AddTentative(p, nodes[:1], at)
					l.Rank(tentative, p, nodes)
				case 9:
					l.ReserveAll([]ledger.Request{{Pod: p, Nodes: nodes}, {Pod: shared[0], Nodes: nodes}}, [][]gpu.PodUID{{shared[1].UID}}, binpack, at)
				case 10:
					l.ReserveAwaited(testItem, []ledger.Request{{Pod: p, Nodes: nodes}}, longAgo)
					l.Move(ledger.Request{Pod: p, Nodes: nodes}, binpack, at)
				case 11:
					l.End(ledger.Queued, testItem.ID)
					l.ReservedFor(p, nodes)
					l.AwaitedIdle()
					l.StillUsable(p.UID)
				}
			}
		}, checkSums)
		want, got := map[gpu.PodUID]string{}, map[gpu.PodUID]string{}
		for _, n := range l.Nodes() {
			for _, h := range n.Allocations {
				got[h.UID] += n.Name
			}
		}
		for _, p := range shared {
			if node, _, held := l.Lookup(p.UID); held {
				want[p.UID] = node
			}
		}
		expect(t, "the nodes of the pods (Lookup, Nodes)", want, got)
	}
	for _, p := range shared {
		l.Remove(p.UID)
	}
	for _, n := range l.Nodes() {
		expect(t, n.Name+" has allocations", 0, len(n.Allocations))
		l.DeleteNode(n.Name)
	}
	expect(t, "nodes after all were deleted", []ledger.Node{}, l.Nodes())
}

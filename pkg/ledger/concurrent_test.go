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
)

const (
	workers  = 8
	podsEach = 12
	rounds   = 400
	bursts   = 40
)

// concurrently runs the workers concurrently, each with its own random numbers and pods, while another goroutine audits
// all nodes repeatedly.
func concurrently(t *testing.T, l *ledger.Ledger, work func(random *rand.Rand, pods []gpu.Pod), audit func(ledger.Node) error) {
	t.Helper()
	var working, auditing sync.WaitGroup
	done := make(chan struct{})
	auditing.Go(func() {
		for {
			for _, n := range l.Nodes() {
				if err := audit(n); err != nil {
					t.Error(err)
					return
				}
			}
			select {
			case <-done:
				return
			default:
			}
		}
	})
	for worker := range workers {
		working.Go(func() {
			random := rand.New(rand.NewPCG(uint64(worker), rand.Uint64()))
			pods := make([]gpu.Pod, podsEach)
			for i := range pods {
				pods[i] = pod(fmt.Sprintf("w%d-p%02d", worker, i), gpu.Memory(1+random.IntN(10)))
			}
			work(random, pods)
		})
	}
	working.Wait()
	close(done)
	auditing.Wait()
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

// checkEmpty checks that none of the pods has an allocation.
func checkEmpty(t *testing.T, l *ledger.Ledger) {
	t.Helper()
	for worker := range workers {
		for i := range podsEach {
			uid := pod(fmt.Sprintf("w%d-p%02d", worker, i), 0).UID
			if node, _, held := l.Lookup(uid); held {
				t.Errorf("%s still has an allocation on %s", uid, node)
			}
		}
	}
	for _, n := range l.Nodes() {
		for i, used := range n.Used {
			if used != 0 {
				t.Errorf("node %s: %d of card %d are still used", n.Name, used, n.Cards[i].Index)
			}
		}
		if len(n.Allocations) > 0 {
			t.Errorf("node %s still has the allocations %v", n.Name, n.Allocations)
		}
		l.DeleteNode(n.Name)
	}
	expect(t, "nodes after all were deleted", []ledger.Node{}, l.Nodes())
}

// Concurrent reservations never allocate more of a card than it has, and the ledger calls freed exactly once for each
// removed allocation.
func TestConcurrentReserve(t *testing.T) {
	nodes := []string{"n0", "n1", "n2"}
	var freed, removed, rejected atomic.Int64
	l := ledger.New()
	l.AddFreedListener(func(string) { freed.Add(1) })
	for _, node := range nodes {
		l.SetNode(node, spec(16, 16, 12))
	}
	freed.Store(0)

	concurrently(t, l, func(random *rand.Rand, pods []gpu.Pod) {
		for range rounds {
			pod := pods[random.IntN(len(pods))]
			switch random.IntN(5) {
			case 0, 1, 2:
				node := nodes[random.IntN(len(nodes))]
				policy := placement.Policies()[random.IntN(2)]
				got, err := l.Reserve(node, pod, policy, at)
				if err != nil {
					rejected.Add(1)
				} else if where, found, held := l.Lookup(pod.UID); !held || where != node || !found.Placement.Equal(got.Placement) {
					t.Errorf("Reserve: %s has %s of %s, Lookup: %s of %q", pod, got.Placement, node, found.Placement, where)
				}
			case 3:
				if l.Confirm(pod.UID) && l.Release(pod.UID) {
					t.Errorf("%s was released after its confirmation", pod)
				}
			case 4:
				if l.Release(pod.UID) || l.Remove(pod.UID) {
					removed.Add(1)
				}
			}
		}
		for _, pod := range pods {
			if l.Remove(pod.UID) {
				removed.Add(1)
			}
		}
	}, func(n ledger.Node) error {
		for i, c := range n.Cards {
			if n.Used[i] > c.Memory {
				return fmt.Errorf("node %s: %d of card %d are used, it has %d", n.Name, n.Used[i], c.Index, c.Memory)
			}
		}
		return checkSums(n)
	})

	if freed.Load() != removed.Load() {
		t.Errorf("freed was called %d times, allocations were removed %d times", freed.Load(), removed.Load())
	}
	if removed.Load() == 0 || rejected.Load() == 0 {
		t.Errorf("%d allocations removed and %d reservations rejected: too few conflicts", removed.Load(), rejected.Load())
	}
	checkEmpty(t, l)
}

// Concurrent reservations, pod events and node events, including deletion and new creation of nodes. In any order the
// used memory is the sum of the allocations, a pod has at most one allocation, and none is left at the end.
func TestConcurrentOperations(t *testing.T) {
	nodes := []string{"n0", "n1", "n2"}
	var freed atomic.Int64
	l := ledger.New()
	l.AddFreedListener(func(string) { freed.Add(1) })
	specs := []ledger.NodeSpec{spec(16, 16), spec(16, 16, 12), spec(8), unhealthy(spec(16, 16)), {Cards: spec(16).Cards, WholeCards: true}}

	concurrently(t, l, func(random *rand.Rand, pods []gpu.Pod) {
		for range rounds {
			pod, node := pods[random.IntN(len(pods))], nodes[random.IntN(len(nodes))]
			switch random.IntN(9) {
			case 0, 1:
				_, _ = l.Reserve(node, pod, placement.Binpack, at)
			case 2:
				l.Confirm(pod.UID)
			case 3:
				l.Release(pod.UID)
			case 4:
				l.SetBound(node, pod, gpu.On(random.IntN(3), pod.Request), at)
				if where, _, held := l.Lookup(pod.UID); !held || where != node {
					t.Errorf("%s was set on %s, Lookup returns %q", pod, node, where)
				}
			case 5:
				l.SetBound(node, pod, nil, at)
			case 6:
				l.Remove(pod.UID)
				if l.Remove(pod.UID) {
					t.Errorf("%s was removed twice", pod)
				}
			case 7:
				l.SetNode(node, specs[random.IntN(len(specs))])
			case 8:
				if random.IntN(4) == 0 {
					l.DeleteNode(node)
				}
				l.Check(pod, nodes, func(string, placement.Reason) {})
				l.AddTentative(pod, nodes[:1], at)
				l.Rank(ledger.View{Card: placement.Binpack, Node: placement.Binpack, TentativeAt: at}, pod, nodes, func(int, placement.Suitability, placement.Reason) {})
			}
		}
		for _, pod := range pods {
			l.Remove(pod.UID)
		}
	}, checkSums)

	if freed.Load() == 0 {
		t.Error("freed was never called")
	}
	checkEmpty(t, l)
}

// Concurrent operations on the same pods: a retried bind during the pod's event, and a deletion between the two.
func TestConcurrentSamePods(t *testing.T) {
	nodes := []string{"n0", "n1"}
	l := ledger.New()
	for _, node := range nodes {
		l.SetNode(node, spec(16, 16))
	}
	var shared []gpu.Pod
	for i := range 4 {
		shared = append(shared, pod(fmt.Sprintf("shared-%d", i), 10))
	}
	// Checked between bursts: while a pod moves, reading the nodes one after the other can return it on both.
	for range bursts {
		concurrently(t, l, func(random *rand.Rand, _ []gpu.Pod) {
			for range rounds / bursts {
				pod, node := shared[random.IntN(len(shared))], nodes[random.IntN(len(nodes))]
				switch random.IntN(5) {
				case 0, 1:
					_, _ = l.Reserve(node, pod, placement.Binpack, at)
				case 2:
					l.SetBound(node, pod, gpu.On(random.IntN(2), pod.Request), at)
				case 3:
					l.Release(pod.UID)
				case 4:
					l.Remove(pod.UID)
				}
			}
		}, checkSums)
		nodesOf := map[gpu.PodUID][]string{}
		for _, n := range l.Nodes() {
			for _, h := range n.Allocations {
				nodesOf[h.UID] = append(nodesOf[h.UID], n.Name)
			}
		}
		for _, pod := range shared {
			where, _, held := l.Lookup(pod.UID)
			if on := nodesOf[pod.UID]; held != (len(on) == 1) || (held && on[0] != where) || len(on) > 1 {
				t.Errorf("%s has allocations on %v, Lookup returns %q", pod, on, where)
			}
		}
	}
	for _, pod := range shared {
		l.Remove(pod.UID)
	}
	checkEmpty(t, l)
}

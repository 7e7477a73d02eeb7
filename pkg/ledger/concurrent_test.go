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

// together runs as many workers at once as there are, each with its own random numbers and its own pods, while an
// auditor looks at the whole ledger again and again.
func together(t *testing.T, l *ledger.Ledger, work func(random *rand.Rand, pods []gpu.Pod), audit func(ledger.Node) error) {
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

// addsUp says whether what is taken of each card is what the holders have of it.
func addsUp(n ledger.Node) error {
	sums := map[int]gpu.Memory{}
	for _, h := range n.Holders {
		for _, share := range h.Placement {
			sums[share.Card] += share.Memory
		}
	}
	for i, c := range n.Cards {
		if n.Used[i] != sums[c.Index] {
			return fmt.Errorf("node %s: %d of card %d are taken, its holders have %d", n.Name, n.Used[i], c.Index, sums[c.Index])
		}
	}
	return nil
}

// isEmpty says whether nothing at all is left of the pods.
func isEmpty(t *testing.T, l *ledger.Ledger) {
	t.Helper()
	for worker := range workers {
		for i := range podsEach {
			uid := pod(fmt.Sprintf("w%d-p%02d", worker, i), 0).UID
			if node, _, held := l.Lookup(uid); held {
				t.Errorf("%s is still held on %s", uid, node)
			}
		}
	}
	for _, n := range l.Nodes() {
		for i, used := range n.Used {
			if used != 0 {
				t.Errorf("node %s: %d of card %d are still taken", n.Name, used, n.Cards[i].Index)
			}
		}
		if len(n.Holders) > 0 {
			t.Errorf("node %s still has the holders %v", n.Name, n.Holders)
		}
		l.DeleteNode(n.Name)
	}
	expect(t, "nodes after all were deleted", []ledger.Node{}, l.Nodes())
}

// Where Reserve alone gives places out, no card is ever promised more than it has, whoever asks at once; and the ledger
// tells of freed memory exactly as often as a hold is given back.
func TestManyReserveAtOnce(t *testing.T) {
	nodes := []string{"n0", "n1", "n2"}
	var freed, givenBack, refused atomic.Int64
	l := ledger.New(func(string) { freed.Add(1) })
	for _, node := range nodes {
		l.SetNode(node, spec(16, 16, 12))
	}
	freed.Store(0)

	together(t, l, func(random *rand.Rand, pods []gpu.Pod) {
		for range rounds {
			pod := pods[random.IntN(len(pods))]
			switch random.IntN(5) {
			case 0, 1, 2:
				node := nodes[random.IntN(len(nodes))]
				policy := placement.Policies()[random.IntN(2)]
				holder, err := l.Reserve(node, pod, policy, at)
				if err != nil {
					refused.Add(1)
				} else if where, found, held := l.Lookup(pod.UID); !held || where != node || !found.Placement.Equal(holder.Placement) {
					t.Errorf("Reserve gave %s %s of %s, Lookup finds %s of %q", pod, holder.Placement, node, found.Placement, where)
				}
			case 3:
				if l.Commit(pod.UID) && l.Release(pod.UID) {
					t.Errorf("%s was released after it was committed", pod)
				}
			case 4:
				if l.Release(pod.UID) || l.Drop(pod.UID) {
					givenBack.Add(1)
				}
			}
		}
		for _, pod := range pods {
			if l.Drop(pod.UID) {
				givenBack.Add(1)
			}
		}
	}, func(n ledger.Node) error {
		for i, c := range n.Cards {
			if n.Used[i] > c.Memory {
				return fmt.Errorf("node %s: %d of card %d are taken, it has %d", n.Name, n.Used[i], c.Index, c.Memory)
			}
		}
		return addsUp(n)
	})

	if freed.Load() != givenBack.Load() {
		t.Errorf("freed was called %d times, memory was given back %d times", freed.Load(), givenBack.Load())
	}
	if givenBack.Load() == 0 || refused.Load() == 0 {
		t.Errorf("%d holds given back and %d refused: the workers didn't get in each other's way", givenBack.Load(), refused.Load())
	}
	isEmpty(t, l)
}

// Everything at once: the API server tells where pods are, cards come and go, nodes are deleted and made anew. Whatever
// the order, the sums are those of the holders, a pod is held once, and nothing is left at the end.
func TestEverythingAtOnce(t *testing.T) {
	nodes := []string{"n0", "n1", "n2"}
	var freed atomic.Int64
	l := ledger.New(func(string) { freed.Add(1) })
	offers := []ledger.NodeSpec{spec(16, 16), spec(16, 16, 12), spec(8), ill(spec(16, 16)), {Cards: spec(16).Cards, WholeCards: true}}

	together(t, l, func(random *rand.Rand, pods []gpu.Pod) {
		for range rounds {
			pod, node := pods[random.IntN(len(pods))], nodes[random.IntN(len(nodes))]
			switch random.IntN(9) {
			case 0, 1:
				_, _ = l.Reserve(node, pod, placement.Binpack, at)
			case 2:
				l.Commit(pod.UID)
			case 3:
				l.Release(pod.UID)
			case 4:
				l.Hold(node, pod, gpu.On(random.IntN(3), pod.Request), at)
				if where, _, held := l.Lookup(pod.UID); !held || where != node {
					t.Errorf("%s was told to be on %s, Lookup finds it on %q", pod, node, where)
				}
			case 5:
				l.Hold(node, pod, nil, at)
			case 6:
				l.Drop(pod.UID)
				if l.Drop(pod.UID) {
					t.Errorf("%s was dropped twice", pod)
				}
			case 7:
				l.SetNode(node, offers[random.IntN(len(offers))])
			case 8:
				if random.IntN(4) == 0 {
					l.DeleteNode(node)
				}
				l.Check(pod, nodes, func(string, placement.Reason) {})
				l.Promise(pod, nodes[:1], at)
				l.Rank(ledger.View{Card: placement.Binpack, Node: placement.Binpack, Promised: at}, pod, nodes, func(int, placement.Suitability, placement.Reason) {})
			}
		}
		for _, pod := range pods {
			l.Drop(pod.UID)
		}
	}, addsUp)

	if freed.Load() == 0 {
		t.Error("nothing ever came free")
	}
	isEmpty(t, l)
}

// All fight for the same pods: a retry of a bind beside the watch's word of it, a deletion in between.
func TestTheSamePodsAtOnce(t *testing.T) {
	nodes := []string{"n0", "n1"}
	l := ledger.New(nil)
	for _, node := range nodes {
		l.SetNode(node, spec(16, 16))
	}
	var shared []gpu.Pod
	for i := range 4 {
		shared = append(shared, pod(fmt.Sprintf("shared-%d", i), 10))
	}
	// Looked at between bursts: while a pod moves, whoever reads one node after the other may find it on both.
	for range bursts {
		together(t, l, func(random *rand.Rand, _ []gpu.Pod) {
			for range rounds / bursts {
				pod, node := shared[random.IntN(len(shared))], nodes[random.IntN(len(nodes))]
				switch random.IntN(5) {
				case 0, 1:
					_, _ = l.Reserve(node, pod, placement.Binpack, at)
				case 2:
					l.Hold(node, pod, gpu.On(random.IntN(2), pod.Request), at)
				case 3:
					l.Release(pod.UID)
				case 4:
					l.Drop(pod.UID)
				}
			}
		}, addsUp)
		holds := map[gpu.PodUID][]string{}
		for _, n := range l.Nodes() {
			for _, h := range n.Holders {
				holds[h.UID] = append(holds[h.UID], n.Name)
			}
		}
		for _, pod := range shared {
			home, _, held := l.Lookup(pod.UID)
			if on := holds[pod.UID]; held != (len(on) == 1) || (held && on[0] != home) || len(on) > 1 {
				t.Errorf("%s is held on %v, and its home is %q", pod, on, home)
			}
		}
	}
	for _, pod := range shared {
		l.Drop(pod.UID)
	}
	isEmpty(t, l)
}

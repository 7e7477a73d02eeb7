package eligibility

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"unique"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// retained adds a pod with the constraints for each of them.
func retained(c *Cluster, constraints ...unique.Handle[string]) {
	for i, one := range constraints {
		c.SetPod(&PodUse{Pod: gpu.Pod{UID: gpu.PodUID(fmt.Sprint("p", i)), Request: 1}, Constraints: one})
	}
}

func setNode(c *Cluster, n *Node) {
	c.SetNode(n.Object, &ledger.NodeSpec{Cards: make([]gpu.Card, 1), Support: n.Support, Closed: n.Closed})
}

// The sets, in which only the nodes that have changed are matched again, are what a check of every node finds, whatever changes.
func TestSets(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	var all []unique.Handle[string]
	for i := range 20 {
		all = append(all, pod(func(p *corev1.Pod) {
			if i%4 > 0 {
				p.Spec.NodeSelector = map[string]string{"x": fmt.Sprint(i % 4)}
			}
			if i%3 == 0 {
				p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
			}
			if i%5 == 0 {
				fake.RequiredAffinity(fake.NodeNamed(fmt.Sprint("n", i)))(p)
			}
		}))
	}
	c, nodes := NewCluster(), map[string]*Node{}
	retained(c, all[:10]...)
	for step := range 1000 {
		name := fmt.Sprint("n", random.IntN(30))
		if random.IntN(4) == 0 {
			delete(nodes, name)
			c.DeleteNode(name)
		} else {
			n := node(name)
			n.Object.Labels["x"] = fmt.Sprint(random.IntN(4))
			if random.IntN(4) == 0 {
				n.Object.Spec.Unschedulable, n.Closed = true, cordoned
			}
			nodes[name] = n
			setNode(c, n)
		}
		if step%500 == 0 {
			nodes["n0"] = node("n0")
			for range 3 * maxChanges { // More than are remembered.
				setNode(c, nodes["n0"])
			}
		}
		for range random.IntN(3) {
			constraints := all[random.IntN(len(all))]
			sorted := slices.SortedFunc(maps.Values(nodes), func(a, b *Node) int { return cmp.Compare(a.Object.Name, b.Object.Name) })
			if diff := gocmp.Diff(NewIndex(sorted).Names(constraints), c.UsableNodes(constraints)); diff != "" {
				t.Fatalf("step %d (-want +got):\n%s", step, diff)
			}
		}
	}
}

// Pods that all have constraints of their own, and can use hundreds of nodes, don't fill the memory: 3,000 such pods at 5,000 nodes take less
// than 16 MiB, also while nodes change.
func TestSetsKeepLittle(t *testing.T) {
	const nodes, pods, limit = 5000, 3000, 16 << 20
	c := NewCluster()
	for i := range nodes {
		n := node(fmt.Sprintf("n%04d", i))
		n.Object.Labels["of"] = fmt.Sprint(i % 10)
		setNode(c, n)
	}
	all := make([]unique.Handle[string], pods)
	for i := range all {
		all[i] = pod(fake.RequiredAffinity(corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: "of", Operator: corev1.NodeSelectorOpIn, Values: []string{fmt.Sprint(i % 10)}},
			{Key: "name", Operator: corev1.NodeSelectorOpNotIn, Values: []string{fmt.Sprintf("n%04d", i)}},
		}}))
	}
	retained(c, all...)
	memory := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := memory()
	for round := range 2 {
		for i, constraints := range all {
			if got := len(c.UsableNodes(constraints)); got != nodes/10-1 {
				t.Fatalf("pod %d can use %d nodes", i, got)
			}
		}
		after := memory()
		t.Logf("round %d: %d KiB", round, (int64(after)-int64(before))>>10)
		if after > before+limit {
			t.Fatalf("round %d: %d MiB are kept", round, (after-before)>>20)
		}
		last := node("n4999")
		last.Object.Labels["of"] = "9"
		setNode(c, last)
	}
	runtime.KeepAlive(c)
}

// Concurrent calls find the same while nodes change.
func TestConcurrentNames(t *testing.T) {
	c := NewCluster()
	constraints := pod()
	retained(c, constraints)
	var calls sync.WaitGroup
	for range 4 {
		calls.Go(func() {
			for range 200 {
				if names := c.UsableNodes(constraints); !slices.IsSorted(names) {
					t.Errorf("unordered: %v", names)
				}
			}
		})
	}
	for i := range 200 {
		setNode(c, node(fmt.Sprint("n", i)))
		if i%3 == 0 {
			c.DeleteNode(fmt.Sprint("n", i/2))
		}
	}
	calls.Wait()
	c.DeleteNode("n199")
	want := slices.Sorted(maps.Keys(c.usable.nodes))
	check.Equal(t, "the result", want, c.UsableNodes(constraints))
}

// Only nodes that have changed are matched again. Sets end with their last pod.
func TestMatchedAgain(t *testing.T) {
	c := NewCluster()
	for i := range 10 {
		setNode(c, node(fmt.Sprint("n", i)))
	}
	first, second := pod(), pod(fake.OntoNode("n3"))
	retained(c, first, second)
	unmatched := func(constraints unique.Handle[string]) int {
		s := c.usable.sets[constraints]
		if s == nil || s.revision == 0 {
			return len(c.usable.nodes)
		}
		return min(c.usable.revision-s.revision, len(c.usable.nodes))
	}
	for _, step := range []struct {
		what   string
		change func()
		want   [2]int
	}{
		{"at first", func() {}, [2]int{10, 10}},
		{"once they are known", func() { c.UsableNodes(first); c.UsableNodes(second) }, [2]int{0, 0}},
		{"after a change of a node", func() { setNode(c, node("n4")) }, [2]int{1, 1}},
		{"after another one, and a deletion", func() { c.UsableNodes(first); setNode(c, node("n5")); c.DeleteNode("n6") }, [2]int{2, 3}},
		{"after the end of the pod", func() { c.UsableNodes(first); c.DeletePod("p0") }, [2]int{9, 3}},
		{"without such a pod", func() { c.UsableNodes(first) }, [2]int{9, 3}},
		{"without any pod", func() { c.DeletePod("p1") }, [2]int{9, 9}},
	} {
		step.change()
		if got := [2]int{unmatched(first), unmatched(second)}; got != step.want {
			t.Errorf("%s: %d nodes are to be matched, want %v", step.what, got, step.want)
		}
	}
	if len(c.usable.sets) > 0 {
		t.Errorf("%d sets are kept", len(c.usable.sets))
	}
}

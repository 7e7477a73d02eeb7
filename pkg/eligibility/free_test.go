package eligibility

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// randomCluster is a Cluster beside what was reported to it.
type randomCluster struct {
	*rand.Rand
	cluster *Cluster
	nodes   map[string]corev1.ResourceList
	pods    map[gpu.PodUID]*PodUse
}

const randomNodes, randomPods = 4, 12

var randomResources = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourcePods, "example.com/nic"}

// node sets a node, or changes what it lists.
func (r *randomCluster) node(name string) {
	list := corev1.ResourceList{}
	for _, resourceName := range randomResources {
		if r.IntN(4) > 0 {
			list[resourceName] = *resource.NewQuantity(r.Int64N(20), resource.DecimalSI)
		}
	}
	r.nodes[name] = list
	r.cluster.free.setNode(name, list)
}

// pod sets a pod: a new one, or one that was resized, nominated, bound to any node, or given a deletion timestamp.
func (r *randomCluster) pod(uid gpu.PodUID) {
	p := &PodUse{Pod: gpu.Pod{UID: uid, Request: gpu.Memory(r.IntN(2)), Priority: int32(r.IntN(2)), Leaving: r.IntN(4) == 0}}
	if former := r.pods[uid]; former != nil && r.IntN(2) == 0 {
		same := *former
		p = &same
	}
	node := fmt.Sprint("n", r.IntN(randomNodes))
	switch r.IntN(3) {
	case 0:
		p.Node, p.NominatedNode = node, ""
	case 1:
		p.NominatedNode = node
		if p.Node != "" {
			p.NominatedNode = ""
		}
	}
	list := corev1.ResourceList{}
	for _, resourceName := range randomResources {
		if r.IntN(3) == 0 && resourceName != corev1.ResourcePods {
			list[resourceName] = *resource.NewQuantity(r.Int64N(5), resource.DecimalSI)
		}
	}
	p.Requests = AmountsOf(list)
	r.pods[uid] = p
	r.cluster.SetPod(p)
}

// want counts what a node has free from the beginning.
func (r *randomCluster) want(name string) Amounts {
	list, known := r.nodes[name]
	if !known {
		return nil
	}
	free := AmountsOf(list)
	for _, p := range r.pods {
		if p.Node == name {
			for resourceName := range list {
				free[resourceName] -= p.Use(resourceName)
			}
		}
	}
	return free
}

// got returns what the cluster counts as free on a node.
func (r *randomCluster) got(name string) Amounts {
	n := r.cluster.free.known(name)
	if n == nil {
		return nil
	}
	free := Amounts{}
	for resourceName, amount := range n.allocatable {
		free[resourceName] = amount - n.used[resourceName]
	}
	return free
}

// What nodes have free, kept by differences, is what a count from the beginning finds, in any order of events: nodes that come after their
// pods, that change, go and come back; pods that are resized, nominated, bound, moved, and end. Nothing
// is kept in the end.
func TestFree(t *testing.T) {
	for seed := range uint64(30) {
		r := &randomCluster{rand.New(rand.NewPCG(seed, 1)), NewCluster(), map[string]corev1.ResourceList{}, map[gpu.PodUID]*PodUse{}}
		name, uid := func(i int) string { return fmt.Sprint("n", i) }, func(i int) gpu.PodUID { return gpu.PodUID(fmt.Sprint("p", i)) }
		state := func(of func(name string) Amounts) (all []Amounts) {
			for i := range randomNodes {
				all = append(all, of(name(i)))
			}
			return all
		}
		for step := range 200 {
			switch n, p := r.IntN(randomNodes), r.IntN(randomPods); r.IntN(10) {
			case 0:
				r.node(name(n))
			case 1:
				delete(r.nodes, name(n))
				r.cluster.DeleteNode(name(n))
			case 2:
				delete(r.pods, uid(p))
				r.cluster.DeletePod(uid(p))
			case 3: // Nothing has changed.
				if former := r.pods[uid(p)]; former != nil {
					again := *former
					r.pods[uid(p)] = &again
					r.cluster.SetPod(&again)
				}
			default:
				r.pod(uid(p))
			}
			r.compareFits(t, name(r.IntN(randomNodes)))
			if diff := cmp.Diff(state(r.want), state(r.got)); diff != "" {
				t.Fatalf("seed %d, step %d (-want +got):\n%s", seed, step, diff)
			}
		}
		for i := range max(randomNodes, randomPods) {
			r.cluster.DeletePod(uid(i))
			r.cluster.DeleteNode(name(i))
		}
		if f := &r.cluster.free; len(f.pods)+len(f.nodes) > 0 {
			t.Fatalf("seed %d: %d pods and %d nodes are kept", seed, len(f.pods), len(f.nodes))
		}
	}
}

// compareFits asks whether some pods fit the node, and compares the answer with a count from the beginning.
func (r *randomCluster) compareFits(t *testing.T, node string) {
	some := func() (uids []gpu.PodUID) {
		for i := range randomPods {
			if r.IntN(4) == 0 {
				uids = append(uids, gpu.PodUID(fmt.Sprint("p", i)))
			}
		}
		return uids
	}
	q := ledger.ResourceQuery{Node: node, Pods: some(), Ahead: some(), Ending: some(), Listed: r.IntN(2) == 0}
	pending := func(p *PodUse) bool { return p.Node == "" && !p.Leaving && p.Request > 0 }
	use := func(uids []gpu.PodUID, which func(*PodUse) bool, resourceName corev1.ResourceName) (sum int64) {
		for _, uid := range uids {
			if p := r.pods[uid]; p != nil && which(p) {
				sum += p.Use(resourceName)
			}
		}
		return sum
	}
	want, state := true, r.want(node)
	for _, resourceName := range randomResources {
		if state == nil {
			break
		}
		free, listed := state[resourceName]
		need := use(q.Pods, pending, resourceName)
		free += use(q.Ending, func(p *PodUse) bool { return p.Node == node }, resourceName) - use(q.Ahead, pending, resourceName)
		if need > 0 && (listed && need > free || !listed && q.Listed) {
			want = false
		}
	}
	if got := r.cluster.Fits(q); got != want {
		t.Fatalf("%+v: fits %t, want %t", q, got, want)
	}
}

// TestFreeBeside: what the bound pods leave of a node's CPU and memory, what it has, and what a pod asks for.
func TestFreeBeside(t *testing.T) {
	c := NewCluster()
	use := func(uid gpu.PodUID, node string, request gpu.Memory, cpu, memory int64) *PodUse {
		return &PodUse{Pod: gpu.Pod{UID: uid, Request: request}, Node: node, Requests: Amounts{corev1.ResourceCPU: cpu, corev1.ResourceMemory: memory}}
	}
	c.SetPod(use("early", "n1", 4, 1000, 100)) // Pods can come before their node.
	if _, _, known := c.FreeResources("n1"); known {
		t.Error("a node that isn't known has something free")
	}
	c.free.setNode("n1", corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("1000")})
	c.free.setNode("n2", corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8")})
	c.SetPod(use("without GPU memory", "n1", 0, 2000, 200))
	c.SetPod(use("pending", "", 4, 3000, 300))
	before, all, _ := c.FreeResources("n1")
	c.SetPod(use("too much", "n1", 0, 9000, 0))
	after, _, _ := c.FreeResources("n1")
	other, allOther, _ := c.FreeResources("n2")
	want := []placement.NodeResources{
		{CPU: 5000, NodeMemory: 700}, {CPU: 0, NodeMemory: 700}, {CPU: 8000, NodeMemory: math.MaxInt64},
		{CPU: 8000, NodeMemory: 1000}, {CPU: 8000, NodeMemory: math.MaxInt64},
	}
	if diff := cmp.Diff(want, []placement.NodeResources{before, after, other, all, allOther}); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	shape, known := c.Shape("pending")
	if want := (placement.Shape{Demand: gpu.Demand{Cards: 1, Memory: 4, Containers: 1}, NodeResources: placement.NodeResources{CPU: 3000, NodeMemory: 300}}); !known || shape != want {
		t.Errorf("shape %+v, want %+v", shape, want)
	}
	if shape, _ := c.Shape("without GPU memory"); shape.Cards != 0 || shape.CPU != 2000 {
		t.Errorf("shape %+v of a pod without GPU memory", shape)
	}
}

package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// constraintsFixture is a fixture whose nodes have the labels "name" and "pool".
type constraintsFixture struct {
	*fixture
	cluster *eligibility.Cluster
}

// node adds a node with one card, or reports it again.
func (f *constraintsFixture) node(name, pool string, memory gpu.Memory) {
	object := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"name": name, "pool": pool}}}
	spec := ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: memory}}}
	f.cluster.SetNode(object, &spec)
	f.ledger.SetNode(name, spec)
	f.NodesChanged()
}

// in adds a gated pod that can use the nodes of a pool, except one.
func (f *constraintsFixture) in(pool, except, name string, memory gpu.Memory, edits ...edit) {
	requirements := []corev1.NodeSelectorRequirement{
		{Key: "pool", Operator: corev1.NodeSelectorOpIn, Values: []string{pool}},
		{Key: "name", Operator: corev1.NodeSelectorOpNotIn, Values: []string{except}},
	}
	object := &corev1.Pod{}
	object.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: requirements}},
	}}}
	constraints := eligibility.ConstraintsOf(object)
	f.cluster.SetPod(&eligibility.PodUse{Pod: gpu.Pod{UID: gpu.PodUID(name), Request: memory}, Constraints: constraints})
	f.pod(name, memory, append(edits, func(p *Pod) { p.Constraints = constraints })...)
}

// A tenant's pods all have constraints of their own, so a round doesn't try all nodes for all of them, and nodes change all the time. Nevertheless each
// of the pods gets its turn, and the last one and a pod of another tenant are granted as soon as there is a node for it. (That such pods take little memory is
// tested in the package eligibility.)
func TestTurnOfEachConstraint(t *testing.T) {
	const nodes, pods = 50, 400
	f := &constraintsFixture{cluster: eligibility.NewCluster()}
	f.fixture = newFixture(t, nil, func(o *Options) { o.Nodes = f.cluster })
	for i := range nodes {
		f.node(fmt.Sprint("n", i), "first", 4)
	}
	for i := range pods {
		f.in("first", fmt.Sprint("n", i), fmt.Sprint("alice/", i), 5)
	}
	f.in("late", "", "alice/last", 4, age(1))
	f.in("late", "none", "bob/0", 4)
	// until lets time pass until the pod is granted.
	until := func(name string, most int) {
		t.Helper()
		for ticks := 0; !slices.Contains(f.granted, name); ticks++ {
			if ticks == most {
				t.Fatalf("%s is not granted after %d ticks", name, ticks)
			}
			f.node("n0", "first", 4)
			f.tick(20 * time.Millisecond)
		}
	}
	for range 30 {
		f.tick(20 * time.Millisecond)
	}
	f.node("late0", "late", 4)
	until("alice/last", 2)
	f.node("late1", "late", 4)
	until("bob/0", 2)
	for _, it := range f.items {
		if it.kind.searchedIn == 0 {
			t.Fatalf("%s had no turn", it.ID)
		}
	}
}

// Two tenants have many pods with constraints of their own, and nodes change all the time. A tenant behind them gets its turn nevertheless.
func TestTurnBehindTenants(t *testing.T) {
	const pods = 300
	f := &constraintsFixture{cluster: eligibility.NewCluster()}
	f.fixture = newFixture(t, nil, func(o *Options) { o.Nodes = f.cluster })
	f.SetNamespace("carol", Namespace{Tenant: "carol", Terms: fairshare.DefaultTerms})
	for i := range 10 {
		f.node(fmt.Sprint("n", i), "first", 4)
	}
	f.node("c", "c", 4)
	f.in("c", "none", "carol/0", 4, on("c"))
	for i := range pods {
		f.in("first", fmt.Sprint("n", i), fmt.Sprint("alice/", i), 5)
		f.in("first", fmt.Sprint("other", i), fmt.Sprint("bob/", i), 5)
	}
	f.in("late", "none", "carol/1", 4)
	f.tick(0)
	f.node("late", "late", 4)
	for range 10 {
		f.node("n0", "first", 4)
		f.tick(20 * time.Millisecond)
	}
	want(t, "granted", []string{"carol/1"}, f.granted)
}

// Many tenants have pods with constraints of their own. A tenant behind them sees a new node soon.
func TestNewNodeBehindTenants(t *testing.T) {
	nodes := []string{"n0"}
	f := newFixture(t, []gpu.Memory{4}, func(o *Options) {
		o.Nodes = nodesOf(func(c unique.Handle[string]) []string {
			if c.Value() == "" {
				return nodes
			}
			return []string{"n0"}
		})
	})
	f.pod("bob/has", 4, on("n0"))
	for n := range 16 {
		name := fmt.Sprint("pinned-", n)
		f.SetNamespace(name, Namespace{Tenant: name})
		for i := range 40 {
			f.pod(fmt.Sprint(name, "/", i), 4, func(p *Pod) { p.Constraints = unique.Make(fmt.Sprint(n, "-", i)) })
		}
	}
	f.SetNamespace("waits", Namespace{Tenant: "waits"})
	f.pod("waits/1", 4)
	f.NodesChanged()
	for range 10 {
		f.tick(20 * time.Millisecond)
	}
	f.ledger.SetNode("n1", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: 4}}})
	nodes = append(nodes, "n1")
	f.NodesChanged()
	for range 3 {
		f.tick(20 * time.Millisecond)
	}
	want(t, "granted", []string{"waits/1"}, f.granted)
}

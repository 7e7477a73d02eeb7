package eligibility_test

import (
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// clusterOf returns a Cluster of the objects.
func clusterOf(nodes []*corev1.Node, pods ...*corev1.Pod) *eligibility.Cluster {
	c := eligibility.NewCluster()
	for _, node := range nodes {
		setNode(c, node)
	}
	for _, pod := range pods {
		c.SetPod(&clustercache.NewPodInfo(pod).PodUse)
	}
	return c
}

func setNode(c *eligibility.Cluster, node *corev1.Node) {
	spec, _ := eligibility.Spec(node, protocol.ParseNode(node))
	c.SetNode(node, &spec)
}

// requesting adds an amount of a resource to the pod's requests.
func requesting(name corev1.ResourceName, n int64) fake.PodEdit {
	return func(pod *corev1.Pod) {
		requests := &pod.Spec.Containers[0].Resources.Requests
		if *requests == nil {
			*requests = corev1.ResourceList{}
		}
		(*requests)[name] = fake.Amount(name, n)[name]
	}
}

// TestCapacity asks how many pods of two CPUs fit a node of eight, one after the other.
func TestCapacity(t *testing.T) {
	type pods = []*corev1.Pod
	const network = corev1.ResourceName("example.com/network")
	memory, cpu := corev1.ResourceMemory, corev1.ResourceCPU
	wanting := func(edits ...fake.PodEdit) []fake.PodEdit { return edits }
	for name, test := range map[string]struct {
		node    corev1.ResourceList
		on      pods
		planned []gpu.PodUID
		empty   bool
		// asking is what the pods ask for beside two CPUs.
		asking []fake.PodEdit
		want   int
	}{
		"an empty node":                                {want: 4},
		"a pod on the node":                            {on: pods{fake.Pod("a", 0, fake.On("n1"), fake.CPU(3))}, want: 2},
		"a pod on another node":                        {on: pods{fake.Pod("a", 0, fake.On("n2"), fake.CPU(3))}, want: 4},
		"more used than there is":                      {on: pods{fake.Pod("a", 0, fake.On("n1"), fake.CPU(9))}},
		"a planned pod":                                {on: pods{fake.Pod("a", 1, fake.CPU(3))}, planned: []gpu.PodUID{"uid-a"}, want: 2},
		"a planned pod that has just been bound":       {on: pods{fake.Pod("a", 1, fake.CPU(3), fake.On("n1"))}, planned: []gpu.PodUID{"uid-a"}, want: 2},
		"a planned pod that is gone":                   {planned: []gpu.PodUID{"uid-a"}, want: 4},
		"a nominated pod of equal priority":            {on: pods{fake.Pod("a", 1, fake.CPU(3), fake.Nominated("n1"))}, want: 2},
		"a nominated pod of lower priority":            {on: pods{fake.Pod("a", 1, fake.CPU(3), fake.Nominated("n1"), fake.Priority(-1))}, want: 4},
		"a nominated pod that is planned":              {on: pods{fake.Pod("a", 1, fake.CPU(3), fake.Nominated("n1"))}, planned: []gpu.PodUID{"uid-a"}, want: 2},
		"without the pods that use GPU memory":         {on: pods{fake.Pod("a", 1, fake.On("n1"), fake.CPU(3)), fake.Pod("b", 1, fake.Nominated("n1"), fake.CPU(3))}, empty: true, want: 4},
		"the pods without GPU memory stay":             {on: pods{fake.Pod("a", 0, fake.On("n1"), fake.CPU(3))}, empty: true, want: 2},
		"memory is short":                              {asking: wanting(requesting(memory, 60)), want: 1},
		"storage is short":                             {asking: wanting(requesting(corev1.ResourceEphemeralStorage, 40)), want: 2},
		"the number of pods is reached":                {on: pods{fake.Pod("a", 0, fake.On("n1"))}, node: fake.Amount(corev1.ResourcePods, 3), want: 2},
		"what the pods don't ask for doesn't matter":   {on: pods{fake.Pod("a", 0, fake.On("n1"), requesting(memory, 200))}, want: 4},
		"an extended resource is short":                {node: fake.Amount(network, 3), asking: wanting(requesting(network, 1)), want: 3},
		"the node doesn't list a resource":             {asking: wanting(requesting(network, 1)), want: 4},
		"it doesn't list it, and has not been offered": {asking: wanting(requesting(network, 1)), empty: true},
		"GPU memory is counted elsewhere": {asking: wanting(func(pod *corev1.Pod) {
			pod.Spec.Containers[0].Resources.Limits = fake.Amount(protocol.ResourceMemory, 1000)
		}), want: 4},
		"a huge request":        {asking: wanting(requesting(cpu, 1<<62))},
		"beside a huge request": {on: pods{fake.Pod("a", 0, fake.On("n1"), requesting(cpu, 1<<62)), fake.Pod("b", 0, fake.On("n1"), requesting(cpu, 1<<62))}},
	} {
		t.Run(name, func(t *testing.T) {
			node := fake.Node("n1", 16)
			node.Status.Allocatable[memory] = fake.Amount(memory, 100)[memory]
			node.Status.Allocatable[corev1.ResourceEphemeralStorage] = fake.Amount(memory, 100)[memory]
			maps.Copy(node.Status.Allocatable, test.node)
			all := test.on
			for i := range 5 {
				all = append(all, fake.Pod(fmt.Sprint("w", i), 1, append([]fake.PodEdit{fake.CPU(2)}, test.asking...)...))
			}
			c := clusterOf([]*corev1.Node{node}, all...).Capacity(func(string) []gpu.PodUID { return test.planned }, test.empty)
			got := 0
			for got < 5 && c.Take("n1", gpu.PodUID(fmt.Sprint("uid-w", got))) {
				got++
			}
			if got != test.want {
				t.Errorf("%d pods fit, want %d", got, test.want)
			}
		})
	}
}

// A planned pod is bound while the node is read. It counts once, as planned or as bound.
func TestCapacityPodIsBoundMeanwhile(t *testing.T) {
	cluster := clusterOf([]*corev1.Node{fake.Node("n1", 16)}, fake.Pod("planned", 1, fake.CPU(4)), fake.Pod("w", 1, fake.CPU(4)), fake.Pod("x", 1, fake.CPU(4)))
	c := cluster.Capacity(func(string) []gpu.PodUID {
		cluster.SetPod(&clustercache.NewPodInfo(fake.Pod("planned", 1, fake.CPU(4), fake.On("n1"))).PodUse)
		return []gpu.PodUID{"uid-planned"}
	}, false)
	if first, second := c.Take("n1", "uid-w"), c.Take("n1", "uid-x"); !first || second {
		t.Errorf("fits: %t, %t; want one pod beside the planned one", first, second)
	}
}

// What a pod returns is free for others, unless the node has too little anyway, and a pod can always take it again.
func TestCapacityReturn(t *testing.T) {
	for name, test := range map[string]struct {
		used int64
		want bool
	}{"room for another": {1, true}, "more used than there is": {5, false}} {
		c := clusterOf([]*corev1.Node{fake.Node("n1", 16)},
			fake.Pod("running", 0, fake.On("n1"), fake.CPU(test.used)), fake.Pod("planned", 1, fake.CPU(4)), fake.Pod("w", 1, fake.CPU(4)),
		).Capacity(func(string) []gpu.PodUID { return []gpu.PodUID{"uid-planned"} }, false)
		for _, step := range []struct {
			what string
			do   func() bool
			want bool
		}{
			{"while the other is planned", func() bool { return c.Take("n1", "uid-w") }, false},
			{"after it has returned", func() bool { c.Return("n1", "uid-planned"); return c.Take("n1", "uid-w") }, test.want},
			{"the other again", func() bool { c.Return("n1", "uid-w"); return c.Take("n1", "uid-planned") }, true},
			{"and then", func() bool { c.Return("n1", "unknown"); return c.Take("n1", "uid-other") && c.Take("n2", "uid-w") }, false},
		} {
			if got := step.do(); got != step.want {
				t.Errorf("%s, %s: %t", name, step.what, got)
			}
		}
	}
}

// What a pod uses that counts as evicted is free for others, also of a resource that nothing has asked for before.
func TestCapacityEvict(t *testing.T) {
	c := clusterOf([]*corev1.Node{fake.Node("n1", 16)},
		fake.Pod("victim", 1, fake.On("n1"), fake.CPU(6)), fake.Pod("w", 1, fake.CPU(4)),
	).Capacity(nil, false)
	for _, step := range []struct {
		what string
		do   func() bool
		want bool
	}{
		{"it fits after an eviction", func() bool { c.Evict("n1", "uid-victim"); c.Evict("n1", "uid-unknown"); return c.Take("n1", "uid-w") }, true},
		{"both fit", func() bool { return c.Restore("n1", "uid-victim") }, false},
		{"the victim alone", func() bool {
			c.Evict("n1", "uid-victim")
			c.Return("n1", "uid-w")
			return c.Restore("n1", "uid-victim")
		}, true},
		{"a pod that isn't there", func() bool { return c.Restore("n1", "uid-unknown") }, true},
		{"a node that isn't there", func() bool { c.Evict("n9", "uid-victim"); return c.Restore("n9", "uid-victim") }, false},
	} {
		if got := step.do(); got != step.want {
			t.Errorf("%s: %t", step.what, got)
		}
	}
}

// A victim that uses too much of what no other pod asks for keeps its place.
func TestCapacityRestore(t *testing.T) {
	node := fake.Node("n1", 16)
	maps.Copy(node.Status.Allocatable, fake.Amount(corev1.ResourceEphemeralStorage, 1))
	for storage, want := range map[int64]bool{0: true, 1: false} {
		c := clusterOf([]*corev1.Node{node},
			fake.Pod("victim", 1, fake.On("n1"), fake.CPU(1), requesting(corev1.ResourceEphemeralStorage, 2)),
			fake.Pod("w", 1, fake.CPU(1), requesting(corev1.ResourceEphemeralStorage, storage)),
		).Capacity(nil, false)
		c.Evict("n1", "uid-victim")
		if !c.Take("n1", "uid-w") {
			t.Errorf("a pod that asks for %d does not fit", storage)
		}
		if got := c.Restore("n1", "uid-victim"); got != want {
			t.Errorf("beside a pod that asks for %d it can stay: %t", storage, got)
		}
	}
}

// Two groups of eight pods fit two nodes by GPU memory. By CPU seven fit each node, or eight.
func TestCapacityOfGroups(t *testing.T) {
	for cpus, want := range map[int64][]bool{7: {false, false}, 8: {true, true}} {
		var nodes []*corev1.Node
		for _, name := range []string{"n1", "n2"} {
			node := fake.Node(name, 16, 16, 16, 16)
			node.Status.Allocatable[corev1.ResourceCPU] = fake.Amount(corev1.ResourceCPU, cpus)[corev1.ResourceCPU]
			nodes = append(nodes, node)
		}
		var pods []*corev1.Pod
		requests := make([][]ledger.Request, 2)
		for i := range 16 {
			pod := fake.Pod(fmt.Sprint("w", i), 8, fake.CPU(1))
			pods = append(pods, pod)
			requests[i/8] = append(requests[i/8], ledger.Request{Pod: protocol.Pod(pod), Nodes: []string{nodes[i/8].Name}})
		}
		l, c := fake.Ledger(nodes...), clusterOf(nodes, pods...).Capacity(nil, false)
		var got []bool
		for i := range requests {
			places, _ := l.ReserveAll(requests[i], nil, ledger.View{Card: placement.Binpack, Node: placement.Binpack}, c, time.Now())
			got = append(got, places != nil)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%d CPUs: planned (-want +got):\n%s", cpus, diff)
		}
	}
}

// BenchmarkCapacity asks about 5,000 nodes with 40 pods each, on which nothing has changed since they were asked about, or
// everything has.
func BenchmarkCapacity(b *testing.B) {
	var nodes []*corev1.Node
	pods := []*corev1.Pod{fake.Pod("w", 1, fake.CPU(8))}
	for i := range 5000 {
		node := fake.Node(fmt.Sprint("n", i), 16)
		nodes = append(nodes, node)
		for j := range 40 {
			pods = append(pods, fake.Pod(fmt.Sprint("p", i, "-", j), 1, fake.CPU(1), fake.On(node.Name)))
		}
	}
	cluster := clusterOf(nodes, pods...)
	run := func() {
		c := cluster.Capacity(nil, false)
		for _, node := range nodes {
			if c.Take(node.Name, "uid-w") {
				b.Fatal("it fits")
			}
		}
	}
	b.Run("no change", func(b *testing.B) {
		run()
		for b.Loop() {
			run()
		}
	})
	b.Run("all changed", func(b *testing.B) {
		states := [2][]*eligibility.PodUse{}
		for i := range nodes {
			for j := range states {
				pod := fake.Pod(fmt.Sprint("p", i, "-0"), 1, fake.CPU(int64(1+j)), fake.On(nodes[i].Name))
				states[j] = append(states[j], &clustercache.NewPodInfo(pod).PodUse)
			}
		}
		for i := 0; b.Loop(); i++ {
			for _, pod := range states[i%2] {
				cluster.SetPod(pod)
			}
			run()
		}
	})
}

// Each pod of many can request a resource that no node has.
func TestCapacityUnknownResources(t *testing.T) {
	var pods []*corev1.Pod
	for i := range 10 {
		pods = append(pods, fake.Pod(fmt.Sprint("p", i), 1, requesting(corev1.ResourceName(fmt.Sprint("example.com/", i)), 1), requesting("cpu", 1)))
	}
	node := fake.Node("n", 16)
	node.Status.Allocatable[corev1.ResourceCPU], node.Status.Allocatable[corev1.ResourcePods] = fake.Amount("cpu", 8)["cpu"], fake.Amount("pods", 100)["pods"]
	for _, empty := range []bool{false, true} {
		c := clusterOf([]*corev1.Node{node}, pods...).Capacity(nil, empty)
		taken := 0
		for i := range pods {
			if c.Take("n", gpu.PodUID(fmt.Sprint("uid-p", i))) {
				taken++
			}
		}
		// Another extender may provide the resource; an empty node without it has no room for the pod.
		if want := map[bool]int{false: 8, true: 0}[empty]; taken != want {
			t.Errorf("empty: %v: %d pods fit, want %d", empty, taken, want)
		}
	}
}

package eligibility_test

import (
	"fmt"
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
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

// TestFits asks how many pods of two CPUs fit a node of eight together.
func TestFits(t *testing.T) {
	type pods = []*corev1.Pod
	const network = corev1.ResourceName("example.com/network")
	memory, cpu := corev1.ResourceMemory, corev1.ResourceCPU
	a, wanting := []gpu.PodUID{"uid-a"}, func(edits ...fake.PodEdit) []fake.PodEdit { return edits }
	for name, test := range map[string]struct {
		node corev1.ResourceList
		on   pods
		q    ledger.ResourceQuery
		// asking is what the pods ask for beside two CPUs.
		asking []fake.PodEdit
		want   int
	}{
		"an empty node":                              {want: 4},
		"a pod on the node":                          {on: pods{fake.Pod("a", 0, fake.On("n1"), fake.CPU(3))}, want: 2},
		"a pod on another node":                      {on: pods{fake.Pod("a", 0, fake.On("n2"), fake.CPU(3))}, want: 4},
		"a pod on the node that ends":                {on: pods{fake.Pod("a", 1, fake.On("n1"), fake.CPU(3))}, q: ledger.ResourceQuery{Ending: a}, want: 4},
		"a pod on another node that ends":            {on: pods{fake.Pod("a", 1, fake.On("n2"), fake.CPU(3))}, q: ledger.ResourceQuery{Ending: a}, want: 4},
		"more used than there is":                    {on: pods{fake.Pod("a", 0, fake.On("n1"), fake.CPU(9))}},
		"a pod ahead":                                {on: pods{fake.Pod("a", 1, fake.CPU(3))}, q: ledger.ResourceQuery{Ahead: a}, want: 2},
		"a pod ahead that has just been bound":       {on: pods{fake.Pod("a", 1, fake.CPU(3), fake.On("n1"))}, q: ledger.ResourceQuery{Ahead: a}, want: 2},
		"a pod ahead that is gone":                   {q: ledger.ResourceQuery{Ahead: a}, want: 4},
		"memory is short":                            {asking: wanting(requesting(memory, 60)), want: 1},
		"storage is short":                           {asking: wanting(requesting(corev1.ResourceEphemeralStorage, 40)), want: 2},
		"the number of pods is reached":              {on: pods{fake.Pod("a", 0, fake.On("n1"))}, node: fake.Amount(corev1.ResourcePods, 3), want: 2},
		"what the pods don't ask for doesn't matter": {on: pods{fake.Pod("a", 0, fake.On("n1"), requesting(memory, 200))}, want: 4},
		"an extended resource is short":              {node: fake.Amount(network, 3), asking: wanting(requesting(network, 1)), want: 3},
		"the node doesn't list a resource":           {asking: wanting(requesting(network, 1)), want: 4},
		"it doesn't list it, and must":               {asking: wanting(requesting(network, 1)), q: ledger.ResourceQuery{Listed: true}},
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
			c, got := clusterOf([]*corev1.Node{node}, all...), 0
			for test.q.Node = "n1"; got < 5; got++ {
				test.q.Pods = append(test.q.Pods, gpu.PodUID(fmt.Sprint("uid-w", got)))
				if !c.Fits(test.q) {
					break
				}
			}
			if got != test.want {
				t.Errorf("%d pods fit, want %d", got, test.want)
			}
		})
	}
}

// BenchmarkFits asks about 5,000 nodes with 40 pods each.
func BenchmarkFits(b *testing.B) {
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
	for b.Loop() {
		for _, node := range nodes {
			if cluster.Fits(ledger.ResourceQuery{Node: node.Name, Pods: []gpu.PodUID{"uid-w"}}) {
				b.Fatal("it fits")
			}
		}
	}
}

package diagnosis

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/fake"
)

// manyNodes returns full nodes of eight cards.
func manyNodes(n int) []Node {
	nodes := make([]Node, n)
	for i := range nodes {
		var cards []placement.Card
		for c := range 8 {
			cards = append(cards, card(c, 80, 79))
		}
		nodes[i] = node(fmt.Sprintf("node-%04d", i), gpu.GiB, cards...)
		nodes[i].Object.Labels["gpushare"] = "true"
	}
	return nodes
}

// ofDaemonSet makes a pod one that the controller of DaemonSets creates for the node.
func ofDaemonSet(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.NodeSelector = map[string]string{"gpushare": "true"}
		fake.RequiredAffinity(fake.NodeNamed(name))(p)
	}
}

// BenchmarkDiagnoseDaemonSet diagnoses a pending pod for each of 5,000 nodes.
func BenchmarkDiagnoseDaemonSet(b *testing.B) {
	const n = 5000
	benchmarkDiagnose(b, n, func(i int) *Pod { return pod(8, ofDaemonSet(fmt.Sprintf("node-%04d", i))) })
}

// BenchmarkDiagnoseDeployment diagnoses 5,000 equal pods that kube-scheduler has rejected.
func BenchmarkDiagnoseDeployment(b *testing.B) {
	for _, request := range []int64{1, 8} { // It fits, or doesn't.
		b.Run(fmt.Sprint(request), func(b *testing.B) {
			benchmarkDiagnose(b, 5000, func(int) *Pod {
				return pod(request, condition(corev1.PodReasonUnschedulable,
					"0/5000 nodes are available: 100 node(s) had untolerated taint(s), 200 Insufficient cpu, 4800 no GPU card has enough free memory. "+
						"no new claims to deallocate, preemption: 0/5000 nodes are available: 5000 No preemption victims found for incoming pod."))
			})
		})
	}
}

// BenchmarkDiagnoseRequests diagnoses 5,000 pods with different requests against 5,000 nodes.
func BenchmarkDiagnoseRequests(b *testing.B) {
	benchmarkDiagnose(b, 5000, func(i int) *Pod { return pod(int64(2 + i)) })
}

// BenchmarkDiagnoseSelectors diagnoses 5,000 pods that select a node each by its label.
func BenchmarkDiagnoseSelectors(b *testing.B) {
	benchmarkDiagnose(b, 5000, func(i int) *Pod {
		return pod(8, fake.OntoNode(fmt.Sprintf("node-%04d", i)))
	})
}

func benchmarkDiagnose(b *testing.B, n int, build func(i int) *Pod) {
	nodes, pods := manyNodes(n), make([]*Pod, n)
	for i := range pods {
		pods[i] = build(i)
		pods[i].UID = gpu.PodUID(fmt.Sprint("uid-", i))
	}
	for b.Loop() {
		diagnoses := NewDiagnoser(nodes, pods, now).DiagnoseAll(pods, func(int) *GroupWait { return nil })
		if len(diagnoses) != n {
			b.Fatal(len(diagnoses))
		}
	}
}

package eviction

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/test/fake"
)

// BenchmarkProposedVictims measures one node of a preempt call for which kube-scheduler proposes very many victims.
func BenchmarkProposedVictims(b *testing.B) {
	c := newCluster(fake.Node("n1", 100), fake.Pod("full", 100, fake.Bound("n1", 0)))
	preemptor := clustercache.NewPodInfo(fake.Pod("p", 50, fake.Priority(5)))
	for _, n := range []int{100, 10_000, 40_000} {
		b.Run(fmt.Sprintf("victims=%d", n), func(b *testing.B) {
			var proposal preemption.Victims
			for i := range n {
				proposal.Pods = append(proposal.Pods, gpu.PodUID(fmt.Sprintf("%036d", i)))
			}
			for b.Loop() {
				NewSurvey(c.ledger, c, nil, preemptor, begin).Victims(b.Context(), map[string]preemption.Victims{"n1": proposal})
			}
		})
	}
}

// BenchmarkBudgets measures one node of a preempt call in a namespace with a disruption budget for each of its workloads.
func BenchmarkBudgets(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprintf("budgets=%d", n), func(b *testing.B) {
			objects := []runtime.Object{fake.Node("n1", 80, 80, 80, 80, 80, 80, 80, 80)}
			for i := range n {
				objects = append(objects, fake.Budget(fmt.Sprint("b", i), fmt.Sprint("app-", i), 1))
			}
			for i := range 80 {
				objects = append(objects, fake.Pod(fmt.Sprint("v", i), 8, fake.Bound("n1", i/10), fake.Label(fmt.Sprint("app-", i%n))))
			}
			c := newCluster(objects...)
			survey := NewSurvey(c.ledger, c, nil, clustercache.NewPodInfo(fake.Pod("p", 40, fake.Priority(5))), begin)
			for b.Loop() {
				survey.node("n1", preemption.Victims{Pods: []gpu.PodUID{"uid-v0"}})
			}
		})
	}
}

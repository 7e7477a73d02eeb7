package requeue

import (
	"fmt"
	"testing"
	"unique"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/test/fake"
)

// Two pools of nodes of eight cards each: one is full, the other is empty. Pods that may use only the full pool are rejected on samples of it.
// BenchmarkHasRoom measures what each such filter call costs, BenchmarkRetrySamples a round for 200 of these pods.
func BenchmarkHasRoom(b *testing.B) {
	benchmark(b, func(b *testing.B, f *fixture, pods []*clustercache.PodInfo) {
		for b.Loop() {
			if _, room := f.attempts.roomFor(pods[0]); room {
				b.Fatal("a full node has room")
			}
		}
	})
}

func BenchmarkRetrySamples(b *testing.B) {
	candidates := sample(minFeasibleNodesToFind)
	benchmark(b, func(b *testing.B, f *fixture, pods []*clustercache.PodInfo) {
		for b.Loop() {
			b.StopTimer()
			for _, pod := range pods {
				f.Rejected(pod.Pod, candidates, f.Revision())
			}
			f.clock.Step(ledger.TentativeLifetime)
			b.StartTimer()
			f.RetrySamples()
		}
	})
}

func benchmark(b *testing.B, run func(b *testing.B, f *fixture, pods []*clustercache.PodInfo)) {
	for _, size := range []int{1000, 5000, 10_000} {
		b.Run(fmt.Sprintf("nodes=%d", size), func(b *testing.B) {
			var nodes []*corev1.Node
			for i := range size {
				nodes = append(nodes, fake.Node(fmt.Sprintf("node-%05d", i), 80, 80, 80, 80, 80, 80, 80, 80))
			}
			f := newFixture(b, nodes...)
			var full []string
			for i := 0; i < size; i += 2 {
				full = append(full, nodes[i].Name)
				for c := range 8 {
					f.ledger.SetBound(nodes[i].Name, gpu.Pod{UID: gpu.PodUID(fmt.Sprint(i, "-", c)), Request: 70}, gpu.On(c, 70), f.clock.Now())
				}
			}
			f.attempts.EligibleNodes = func(unique.Handle[string]) []string { return full }
			var pods []*clustercache.PodInfo
			for i := range 200 {
				pod := clustercache.NewPodInfo(fake.Pod(fmt.Sprint("p", i), 40))
				pods, f.cache.pending[pod.UID] = append(pods, pod), pod
			}
			run(b, f, pods)
		})
	}
}

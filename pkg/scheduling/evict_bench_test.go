package scheduling

import (
	"fmt"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
)

// BenchmarkEvictorHopeless measures one step with maxBlocked blocked pods, none of which has a plan. On 120 nodes with
// 8 cards and 24 pods each, either no pod has a lower priority, or budgets guard all pods.
func BenchmarkEvictorHopeless(b *testing.B) {
	for name, priority := range map[string]int32{"equal priority": 0, "guarded": 9} {
		b.Run(name, func(b *testing.B) {
			objects := []runtime.Object{newBudget("all", "x", 0)}
			var names []string
			for i := range 120 {
				names = append(names, fmt.Sprint("n", i))
				objects = append(objects, fragmentedNode(b, names[i], 16, 16, 16, 16, 16, 16, 16, 16))
				for pod := range 24 {
					objects = append(objects, edited(boundPod(fmt.Sprintf("p-%d-%d", i, pod), 4, names[i], pod%8), label("x")))
				}
			}
			for i := range maxBlocked {
				objects = append(objects, ranked(newPod(fmt.Sprint("w", i), 8), priority))
			}
			f := startWith(b, Options{BindTimeout: patient}, func(c *Cluster) { c.evictor = newEvictor(c) }, objects...)
			for b.Loop() {
				b.StopTimer()
				f.evictor.clear()
				for i := range maxBlocked {
					f.Blocked(ranked(newPod(fmt.Sprint("w", i), 8), priority), slices.Values(names), f.clock.Now())
				}
				f.clock.Step(evictDelay)
				b.StartTimer()
				f.evictor.tick(b.Context())
			}
		})
	}
}

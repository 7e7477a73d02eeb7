package gang

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestLargeGroupRuns keeps eight cards full with single pods of half a card, each of which runs for some seconds. Without an
// awaited reservation, a gang that needs six whole cards stays pending forever.
func TestLargeGroupRuns(t *testing.T) {
	const life = 2 * time.Second
	c := shared.Start(t)
	f := newFixture(t, c, 2, 2, 2, 2)
	stop := f.runSinglePods(16, life)
	f.waitCounts("the cards are full", func(counts map[string]int) bool { return counts[""] >= 16 })
	before := c.Metric(t, framework.MetricReservations)
	f.createGang("big", 6)

	var took []time.Duration
	rounds := controlplane.Times(1, 10)
	for round := range rounds {
		start := time.Now()
		f.waitCounts("the gang is bound", func(counts map[string]int) bool { return counts["big"] == 6 })
		took = append(took, time.Since(start))
		c.CheckCards(t)
		f.DeleteGroup("big")
		if round+1 < rounds {
			f.createGang("big", 6)
		}
	}
	reservations, ended := c.Metric(t, framework.MetricReservations)-before, stop()
	slices.Sort(took)
	t.Logf("%d rounds with %v choices of cards, beside %d single pods of %v: half of the gangs were bound within %v, all within %v",
		len(took), reservations, ended, life, took[len(took)/2].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
	if reservations == 0 {
		t.Error("no reservation was made")
	}
}

// runSinglePods keeps n single pods of half a card running and n pending. Each of them ends some time after its bind.
// The returned function stops that and returns how many have run.
func (f *fixture) runSinglePods(n int, life time.Duration) (stop func() int) {
	ctx, cancel := context.WithCancel(f.Context())
	var running sync.WaitGroup
	made, ran := 0, 0
	running.Go(func() {
		since := map[string]time.Time{}
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			pods, err := f.List(ctx)
			if err != nil {
				continue // Either the test ends, or its own calls fail too.
			}
			waiting := 0
			for i := range pods {
				pod := &pods[i]
				switch {
				case pod.Labels[framework.LabelGroup] != "":
				case pod.Spec.NodeName == "":
					waiting++
				case since[pod.Name].IsZero():
					since[pod.Name] = time.Now()
				case time.Since(since[pod.Name]) > life && f.requestDeletion(ctx, pod) == nil:
					ran++
				}
			}
			for ; waiting < n; waiting++ {
				single := f.Pod(fmt.Sprintf("single-%d", made), card/2).Obj()
				made++
				// If the call was given up, the pod could be created after the test has removed its pods.
				if _, err := f.Pods().Create(context.WithoutCancel(ctx), single, metav1.CreateOptions{}); err != nil {
					break
				}
			}
		}
	})
	stop = sync.OnceValue(func() int {
		cancel()
		running.Wait()
		return ran
	})
	f.Cleanup(func() { stop() })
	return stop
}

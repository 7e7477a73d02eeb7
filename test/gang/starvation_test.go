package gang

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/framework"
)

// TestStarvation: single pods of half a card, each of which runs for some seconds, keep eight cards full. Without a
// starvation reservation, a gang that needs six whole cards waits forever.
func TestStarvation(t *testing.T) {
	const starvationAfter = 5 * time.Second
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB", ExtenderArgs: []string{"--gang-claim-after=0"}})
	f := newFixture(t, bed, 2, 2, 2, 2)
	crowd := f.runSinglePods(16, 4*time.Second)
	f.eventually("the cards are full", func(ctx context.Context) error {
		if counts, err := f.bound(ctx); err != nil || counts[""] < 16 {
			return fmt.Errorf("bound: %v, %w", counts, err)
		}
		return nil
	})

	f.createGang("big", 6, card)
	until := time.Now().Add(time.Duration(shortOrLong(20, 90)) * time.Second)
	f.eventually("the time without starvation reservations is over", func(ctx context.Context) error {
		if counts, err := f.bound(ctx); err != nil || counts["big"] > 0 {
			t.Fatalf("%d members were bound without a starvation reservation: the test shows nothing (%v)", counts["big"], err)
		}
		if time.Now().Before(until) {
			return errors.New("it is not over")
		}
		return nil
	})
	must(t, bed.Extender.Kill())
	args := slices.DeleteFunc(slices.Clone(bed.Extender.Args), func(arg string) bool { return strings.HasPrefix(arg, "--gang-claim-after=") })
	bed.Extender.Args = append(args, "--gang-claim-after="+starvationAfter.String())
	must(t, bed.Extender.Start(t.Context()))

	var took []time.Duration
	for round := range shortOrLong(1, 10) {
		start := time.Now()
		f.eventually("the gang is bound", func(ctx context.Context) error {
			counts, err := f.bound(ctx)
			if err == nil && counts["big"] < 6 {
				err = fmt.Errorf("bound: %v; %s", counts, f.pendingReasons(ctx))
			}
			return err
		})
		took = append(took, time.Since(start))
		f.checkCards()
		f.deleteGang("big")
		if round+1 < shortOrLong(1, 10) {
			f.createGang("big", 6, card)
		}
	}
	reservations, ended := f.metric("gpushare_extender_gang_claims_total"), crowd()
	slices.Sort(took)
	t.Logf("%d rounds with %v starvation reservations, each after %v, beside %d single pods of 4s: half of the gangs ran within %v, all within %v",
		len(took), reservations, starvationAfter, ended, took[len(took)/2].Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond))
	if reservations == 0 {
		t.Error("no starvation reservation was made")
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
			pods, err := f.pods(ctx)
			if err != nil {
				continue // Either the test ends, or its own calls fail too.
			}
			waiting := 0
			for i := range pods {
				pod := &pods[i]
				switch {
				case pod.Labels["group"] != "":
				case pod.Spec.NodeName == "":
					waiting++
				case since[pod.Name].IsZero():
					since[pod.Name] = time.Now()
				case time.Since(since[pod.Name]) > life && f.requestDeletion(ctx, pod) == nil:
					ran++
				}
			}
			for ; waiting < n; waiting++ {
				single := f.pod(fmt.Sprintf("single-%d", made), card/2)
				made++
				if _, err := f.bed.Client.CoreV1().Pods(f.namespace).Create(ctx, single, metav1.CreateOptions{}); err != nil {
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

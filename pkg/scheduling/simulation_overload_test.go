package scheduling

import (
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/queue"
)

// overload is a cluster whose tenants all want 1.6 times their share, for days: each pod that ends is replaced by one like it.
type overload struct {
	*world
	// below is for how long each tenant has been below its share while it has a pod with which it wouldn't be above it, longest the longest such time.
	below   map[string]time.Duration
	longest time.Duration
}

// TestSteadyOverload: once the shares are even, at most ten pods of a tenant are evicted in a day, each for a pod that then runs, and no tenant is
// below its share for longer than docs/design.md says. A short test takes a twelfth of a day, and compares only the evictions of all tenants
// together.
func TestSteadyOverload(t *testing.T) {
	const settled, day, most = 2 * time.Hour, 24 * time.Hour, 10
	long := os.Getenv("GPUSHARE_TEST_LONG") != ""
	for name, tc := range map[string]struct {
		runs func(w *world) time.Duration
		long bool
	}{
		"pods of hours":     {hours, false},
		"pods of all kinds": {allKinds, true},
		"endless pods":      {endless, true},
	} {
		t.Run(strings.ReplaceAll(name, " ", "_"), func(t *testing.T) {
			if tc.long && !long {
				t.Skip("SKIPPED, not tested: make test-long runs this world")
			}
			o := newOverload(1)
			defer o.close()
			o.fill(tc.runs)
			o.runFor(settled)
			before := maps.Clone(o.stats.reclaimedFrom)
			lasts := day / 12
			if long {
				lasts = day
			}
			o.runFor(lasts)
			all, from := 0, 0
			for name, n := range o.stats.reclaimedFrom {
				all, from = all+n-before[name], max(from, n-before[name])
			}
			t.Logf("%d evictions in %v, %d of one tenant; below its share for %v at most", all, lasts, from, o.longest)
			if all > int(most*overloadTenants*int64(lasts)/int64(day)) || long && from > most {
				t.Errorf("%d evictions in %v, %d of one tenant", all, lasts, from)
			}
			if bound := o.fair.reclaimAfter + o.fair.minRuntime + longestGrace + queue.ArrivalTimeout; o.longest > bound {
				t.Errorf("a tenant was below its share for %v, the bound is %v", o.longest, bound)
			}
			if o.violation != "" {
				t.Error(o.violation)
			}
		})
	}
}

// longestGrace is the longest grace period of the pods.
const longestGrace = 30 * time.Second

func hours(w *world) time.Duration { return w.between(time.Hour, 6*time.Hour) }

func allKinds(w *world) time.Duration {
	return []time.Duration{w.between(2*time.Minute, 5*time.Minute), w.between(20*time.Minute, time.Hour), w.between(time.Hour, 4*time.Hour)}[w.random.IntN(3)]
}

func endless(*world) time.Duration { return 0 }

// overloadTenants is the number of tenants.
const overloadTenants = 20

// newOverload returns a cluster with nodes of four cards with 8 each.
func newOverload(seed uint64) *overload {
	o := &overload{below: map[string]time.Duration{}}
	o.world = newWorld(seed, worldOptions{
		replicas: 1, hold: 10 * time.Second, patience: 30 * time.Second, maxIdle: 0.02, maxBackoff: 10 * time.Second,
		fair: fairSharing{reclaimAfter: 5 * time.Minute, minRuntime: 10 * time.Minute, provisioning: 1, pause: time.Second},
	})
	for i := range overloadTenants {
		o.fair.tenants = append(o.fair.tenants, simTenant{fmt.Sprintf("t%02d", i), "1"})
	}
	for i := range 5 {
		o.api.addNode(fmt.Sprint("n", i), "a", 64, 8, 8, 8, 8)
	}
	o.lead()
	o.watchLiveness()
	o.after(time.Minute, o.look)
	return o
}

// fill creates the jobs of all tenants in half an hour.
func (o *overload) fill(runs func(w *world) time.Duration) {
	total := int64(32 * len(o.api.nodes))
	for _, t := range o.fair.tenants {
		for left := 16 * total / int64(10*len(o.fair.tenants)); left > 0; {
			spec := podSpec{memory: []int64{2, 2, 4}[o.random.IntN(3)], tenant: t.name, fairGate: true, grace: o.between(0, longestGrace), lasts: runs(o.world)}
			left -= spec.memory
			o.after(o.between(0, 30*time.Minute), func() {
				o.batchJob(fmt.Sprintf("%s-%d", t.name, o.serial), jobSpec{completions: 1 << 30, parallelism: 1, backoffLimit: 1 << 30}, spec)
			})
		}
	}
}

// look measures for how long tenants are below their shares.
func (o *overload) look() {
	const interval = 10 * time.Second
	o.after(interval, o.look)
	for _, t := range o.replicas[0].scheduler.fair.manager.Tenants() {
		if t.Waiting > 0 && t.Allocated+t.Next.Request <= t.Share {
			o.below[t.Name] += interval
			o.longest = max(o.longest, o.below[t.Name])
		} else {
			delete(o.below, t.Name)
		}
	}
}

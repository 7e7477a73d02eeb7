package gang

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestChurn runs gangs of many sizes and single pods on a cluster that is kept nearly full: gangs end and others start.
// Except during its binds, each gang is whole or has no bound member. No card is ever over-allocated, and all pods run
// in the end.
func TestChurn(t *testing.T) {
	c := shared.Start(t)
	gangs, largest := controlplane.Times(8, 50), controlplane.Times(16, 64)
	cards := controlplane.Times(32, 160)
	f := newFixture(t, c, cardsOf(cards)...)
	grouped := f.churn(cards, gangs, largest, true)
	t.Logf("%d gangs of 2 to %d: %s", gangs, largest, grouped)
	if controlplane.Long() {
		alone := f.churn(cards, gangs, largest, false)
		t.Logf("the same pods without gangs: %s; with gangs %.2f of that throughput", alone, grouped.rate()/alone.rate())
	}
}

// singlesPerGang is the number of single pods that are created with each gang.
const singlesPerGang = 8

// churnResult is the result of one churn.
type churnResult struct {
	pods int
	took time.Duration
	// shares are means over the time from when a tenth of the pods had run until the last pods were created. In the short form
	// that time is too short to measure them.
	shares
	// partial is the longest time for which a gang was seen partial.
	partial time.Duration
}

// lifetime returns a random time for which a gang runs once it is whole, or a single pod. It is short compared with
// real jobs, so that the cost of gathering a gang weighs more than in reality.
func lifetime(random *rand.Rand) time.Duration {
	least := time.Duration(controlplane.Times(3, 20)) * time.Second
	return least + time.Duration(random.Int64N(2*int64(least)))
}

// String returns the figures as text.
func (c churnResult) String() string {
	text := fmt.Sprintf("%d pods took %v, %.1f pods/s; longest seen partial: %v", c.pods, c.took.Round(time.Millisecond), c.rate(), c.partial.Round(time.Millisecond))
	if controlplane.Long() {
		text += fmt.Sprintf("; meanwhile %.0f%% of the memory was bound, %.0f%% allocated, and %.0f%% requested by pending pods",
			100*c.bound, 100*c.allocated, 100*c.requested)
	}
	return text
}

func (c churnResult) rate() float64 { return float64(c.pods) / c.took.Seconds() }

// cardsOf distributes cards over nodes with eight cards each.
func cardsOf(cards int) (nodes []int) {
	for ; cards > 0; cards -= 8 {
		nodes = append(nodes, min(cards, 8))
	}
	return nodes
}

// batch is a gang and the single pods that are created with it.
type batch struct {
	gang string
	size int
	// memory is the sum of the members' requests.
	memory  int
	pods    []*corev1.Pod
	created bool
}

// churn creates the same pods each time, in gangs or not. There are always so many pending pods that they request as
// much as all cards have. A gang ends some time after it is whole, a single pod some time after its bind.
func (f *fixture) churn(cards, gangs, largest int, grouped bool) (out churnResult) {
	f.Helper()
	random := rand.New(rand.NewPCG(11, 11))
	lives := map[string]time.Duration{}
	var batches []batch
	for i := range gangs {
		b := batch{gang: fmt.Sprintf("%s-%d", map[bool]string{true: "in", false: "un"}[grouped], i), size: 2 + random.IntN(largest-1)}
		memory := []int{4, 8, 16}[random.IntN(3)]
		b.memory = b.size * memory
		lives[b.gang] = lifetime(random)
		for j := range b.size {
			pod := f.member(b.gang, b.size, j, int64(memory)).Obj()
			if !grouped {
				pod.Annotations = nil
			}
			lives[pod.Name] = lives[b.gang]
			b.pods = append(b.pods, pod)
		}
		for j := range singlesPerGang {
			pod := f.Pod(fmt.Sprintf("single-%s-%d", b.gang, j), 1+random.Int64N(4)).Obj()
			lives[pod.Name] = lifetime(random)
			b.pods = append(b.pods, pod)
		}
		batches = append(batches, b)
		out.pods += len(b.pods)
	}
	makers, enders := new(errgroup.Group), new(errgroup.Group)
	enders.SetLimit(16)
	come := func(b *batch) {
		b.created = true
		makers.Go(func() error {
			for _, pod := range b.pods {
				if _, err := f.Pods().Create(f.Context(), pod, metav1.CreateOptions{}); err != nil {
					return err
				}
			}
			return nil
		})
	}

	seen := f.watchPods()
	defer seen.stop()
	var middle atomic.Bool
	means := func() shares { return shares{} }
	if controlplane.Long() {
		means = f.measureShares(seen, gpu.Memory(cards*card), &middle)
	}
	start := time.Now()
	ran, partial, since, ended := map[string]int{}, map[string]time.Time{}, map[string]time.Time{}, map[string]bool{}
	// hasRun reports whether the lifetime is over. It counts from the first call.
	hasRun := func(name string) bool {
		if since[name].IsZero() {
			since[name] = time.Now()
		}
		return time.Since(since[name]) > lives[name]
	}
	framework.Within(f, time.Duration(controlplane.Times(4, 25))*time.Minute, "all pods have run", func(context.Context) error {
		bound := map[string]int{}
		for _, pod := range seen.bound() {
			gang := pod.Labels[framework.LabelGroup]
			if grouped && gang != "" {
				bound[gang]++
			} else if !ended[pod.Name] && hasRun(pod.Name) {
				ended[pod.Name] = true
				ran[gang]++
				enders.Go(func() error { return f.requestDeletion(f.Context(), pod) })
			}
		}
		done, asked, more := 0, 0, false
		for i := range batches {
			b := &batches[i]
			switch n := bound[b.gang]; {
			case ran[b.gang] == b.size:
				done++
				continue
			case !b.created && asked < 2*cards*card:
				come(b)
			case !b.created:
				more = true
				continue
			case n == b.size:
				delete(partial, b.gang)
				if hasRun(b.gang) {
					ran[b.gang] = b.size
					enders.Go(func() error { return f.requestGroupDeletion(f.Context(), b.gang) })
				}
			case n == 0:
				delete(partial, b.gang)
			case partial[b.gang].IsZero():
				partial[b.gang] = time.Now()
			default:
				// Members are bound one after another, so a gang is partial for a moment.
				out.partial = max(out.partial, time.Since(partial[b.gang]))
				if out.partial > 20*time.Second {
					f.Fatalf("gang %s has been partial for %v: %d of %d", b.gang, out.partial, n, b.size)
				}
			}
			asked += b.memory * (b.size - ran[b.gang]) / b.size
		}
		n := 0
		for _, count := range ran {
			n += count
		}
		middle.Store(n > out.pods/10 && more)
		if n < out.pods {
			return lazyError(func() string {
				return fmt.Sprintf("%d of %d gangs have run, %d of %d pods; %s", done, gangs, n, out.pods, seen.pendingReasons())
			})
		}
		return nil
	})
	out.took = time.Since(start)
	must(f, makers.Wait())
	must(f, enders.Wait())
	out.shares = means()
	for _, violation := range seen.violations() {
		f.Error(violation)
	}
	must(f, f.DeleteAll(f.Context()))
	return out
}

// requestGroupDeletion is DeleteGroup for goroutines.
func (f *fixture) requestGroupDeletion(ctx context.Context, gang string) error {
	return f.Pods().DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)},
		metav1.ListOptions{LabelSelector: framework.LabelGroup + "=" + gang})
}

// lazyError is an error whose text is only built when it is needed.
type lazyError func() string

// Error implements error.
func (l lazyError) Error() string { return l() }

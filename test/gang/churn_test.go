package gang

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/testbed"
)

// TestChurn runs groups of many sizes beside single pods on a cluster that is kept nearly full: groups end and others come.
// At every moment at which no group is on its way all are whole or not bound at all; no card is ever over-full; and all run in the end.
func TestChurn(t *testing.T) {
	bed := testbed.StartForTest(t, testbed.Options{MemoryUnit: "GiB"})
	groups, largest := form(14, 50), form(16, 64)
	s := newStage(t, bed, cardsOf(form(48, 160))...)
	grouped := s.churn(groups, largest, true)
	alone := s.churn(groups, largest, false)
	for name, c := range map[string]churned{"in groups": grouped, "ungrouped": alone} {
		t.Logf("%s: %d pods of %d groups and beside them took %v, %.1f pods/s; in the middle %.0f%% of the memory was taken; longest seen bound in part: %v",
			name, c.pods, groups, c.took.Round(time.Millisecond), c.rate(), 100*c.full, c.partial.Round(time.Millisecond))
	}
	t.Logf("%d groups of 2 to %d that run for %v: %.2f of the throughput of the same pods ungrouped", groups, largest, life(), grouped.rate()/alone.rate())
}

// singles is how many pods without a group come with each group.
const singles = 3

// churned is what came of one churn.
type churned struct {
	pods int
	took time.Duration
	// full is how much of the cards' memory was taken, from when a tenth of the pods had run until half of them had.
	full float64
	// partial is the longest that any group was seen bound in part.
	partial time.Duration
}

// life is how long a group runs once it is whole, and a pod without one: short for any job, so what it costs to come together
// weighs more than it does in life.
func life() time.Duration { return time.Duration(form(5, 30)) * time.Second }

func (c churned) rate() float64 { return float64(c.pods) / c.took.Seconds() }

// cardsOf spreads cards over nodes of eight.
func cardsOf(cards int) (nodes []int) {
	for ; cards > 0; cards -= 8 {
		nodes = append(nodes, min(cards, 8))
	}
	return nodes
}

// churn creates the same pods each time, in groups or not. A group ends when all of it has run for a while, and whoever is in
// none when it has itself.
func (s *stage) churn(groups, largest int, grouped bool) (out churned) {
	s.Helper()
	random := rand.New(rand.NewPCG(11, 11))
	size := map[string]int{}
	start := time.Now()
	makers, ctx := errgroup.WithContext(s.Context())
	// So many groups at a time are there, bound or not: enough that others wait all the time.
	makers.SetLimit(form(8, 16))
	prefix := map[bool]string{true: "in", false: "un"}[grouped]
	over := map[string]func(){}
	var work []func() error
	for i := range groups {
		name, n, memory := fmt.Sprintf("%s-%d", prefix, i), 2+random.IntN(largest-1), []int64{4, 8, 16}[random.IntN(3)]
		done := make(chan struct{})
		size[name], over[name] = n, sync.OnceFunc(func() { close(done) })
		out.pods += n + singles
		work = append(work, func() error {
			for j := range n + singles {
				pod := s.pod(fmt.Sprintf("%s-%d", name, j), memory, in(name, n))
				switch {
				case j >= n:
					pod = s.pod(fmt.Sprintf("single-%s-%d", name, j), 2)
				case !grouped:
					pod.Annotations = nil
				}
				if _, err := s.bed.Client.CoreV1().Pods(s.name).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
					return err
				}
			}
			select {
			case <-done:
			case <-ctx.Done():
			}
			return nil
		})
	}
	begun := make(chan struct{})
	go func() {
		defer close(begun)
		for _, make := range work {
			makers.Go(make)
		}
	}()
	ran, partial, since := map[string]int{}, map[string]time.Time{}, map[string]time.Time{}
	var samples, fullness float64
	s.within(time.Duration(form(4, 25))*time.Minute, "all have run", func(ctx context.Context) error {
		pods, err := s.pods(ctx)
		if err != nil {
			return err
		}
		s.checkCards()
		bound := map[string]int{}
		var taken gpu.Memory
		for i := range pods {
			if pods[i].Spec.NodeName == "" || pods[i].DeletionTimestamp != nil {
				continue
			}
			taken += protocol.PodRequest(&pods[i])
			group := pods[i].Labels["group"]
			if grouped && group != "" {
				bound[group]++
			} else if s.hasRun(since, pods[i].Name) {
				if err := s.end(ctx, &pods[i]); err != nil {
					return err
				}
				ran[group]++
			}
		}
		if n := s.over(ran); n < out.pods/2 && n > out.pods/10 {
			samples, fullness = samples+1, fullness+float64(taken)/float64(form(48, 160)*card)
		}
		done := 0
		for group, n := range size {
			switch {
			case ran[group] == n:
				done++
				over[group]()
			case bound[group] == n:
				delete(partial, group)
				if s.hasRun(since, group) {
					ran[group] = n
					s.removeGroup(group)
				}
			case bound[group] > 0:
				// Members that are being bound one after the other are no group at rest.
				if partial[group].IsZero() {
					partial[group] = time.Now()
				} else if ago := time.Since(partial[group]); ago > 20*time.Second {
					s.Errorf("group %s has been bound in part for %v: %d of %d", group, ago, bound[group], n)
				} else {
					out.partial = max(out.partial, ago)
				}
			default:
				delete(partial, group)
			}
		}
		if n := s.over(ran); n < out.pods {
			return fmt.Errorf("%d of %d groups have, %d of %d pods; %s", done, groups, n, out.pods, strings.TrimSpace(s.waiting(ctx)))
		}
		return nil
	})
	out.took, out.full = time.Since(start), fullness/max(samples, 1)
	for _, end := range over {
		end()
	}
	<-begun
	must(s, makers.Wait())
	must(s, s.sweep(s.Context()))
	return out
}

// hasRun says whether what was first asked about under that name, once it was bound, has run for as long as all do.
func (*stage) hasRun(since map[string]time.Time, name string) bool {
	if since[name].IsZero() {
		since[name] = time.Now()
	}
	return time.Since(since[name]) > life()
}

// over counts the pods that have run.
func (*stage) over(ran map[string]int) (n int) {
	for _, count := range ran {
		n += count
	}
	return n
}

func (s *stage) end(ctx context.Context, pod *corev1.Pod) error {
	return s.bed.Client.CoreV1().Pods(s.name).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
	})
}

// TestWholeCards: groups that ask for nvidia.com/gpu are counted and held back too, and kube-scheduler finds their places.
func TestWholeCards(t *testing.T) {
	o := testbed.Options{MemoryUnit: "GiB", ExtenderArgs: []string{"--gang-hold=5s"}}
	o.ControlPlane.Scheduler.Edits = append(o.ControlPlane.Scheduler.Edits, func(config map[string]any) error {
		extender := config["extenders"].([]any)[0].(map[string]any)
		extender["managedResources"] = append(extender["managedResources"].([]any),
			map[string]any{"name": string(protocol.ResourceWholeCard), "ignoredByScheduler": false})
		return nil
	})
	bed := testbed.StartForTest(t, o)
	s := newStage(t, bed)
	s.addWholeCards(4, 4)
	// Two groups of five on eight cards, created pod by pod in turns: one gets its five, and the other nothing.
	for i := range 5 {
		s.create(fmt.Sprintf("a-%d", i), 0, in("a", 5), wholeCard)
		s.create(fmt.Sprintf("b-%d", i), 0, in("b", 5), wholeCard)
	}
	first := s.awaitWhole(5, "a", "b")
	s.removeGroup(first)
	if second := s.awaitWhole(5, "a", "b"); first == second {
		t.Errorf("%s ran twice", first)
	}
	s.removeGroup(first)
	s.removeGroup("a")
	s.removeGroup("b")
	s.create("c-0", 0, in("c", 2), wholeCard)
	s.refused("c", 1, "1 of 2 members exist")

	// Nobody reserves whole cards: nine members come to eight cards, and the barrier sends them back until there is a ninth.
	s.createGroup("d", 9, 0, wholeCard)
	s.eventually("eight members have been held and sent back", func(ctx context.Context) error {
		if counts, err := s.bound(ctx); err != nil || len(counts) > 0 {
			t.Fatalf("bound are %v, %v", counts, err)
		}
		if s.metric(`gpushare_extender_gang_failures_total{reason="timed_out"}`) < 1 {
			return errors.New("they haven't")
		}
		return nil
	})
	s.addWholeCards(1)
	s.awaitBound(map[string]int{"d": 9})
}

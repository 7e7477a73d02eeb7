package gang

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

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
	t.Logf("%d groups of 2 to %d beside single pods took %v, the same pods ungrouped %v: %.2f times as long",
		groups, largest, grouped.Round(time.Millisecond), alone.Round(time.Millisecond), grouped.Seconds()/alone.Seconds())
}

// cardsOf spreads cards over nodes of eight.
func cardsOf(cards int) (nodes []int) {
	for ; cards > 0; cards -= 8 {
		nodes = append(nodes, min(cards, 8))
	}
	return nodes
}

// churn creates the same pods each time, in groups or not, and has each group end once all of it runs, and whoever is in none
// once it runs itself. It returns how long it took until all had run.
func (s *stage) churn(groups, largest int, grouped bool) time.Duration {
	s.Helper()
	random := rand.New(rand.NewPCG(11, 11))
	size := map[string]int{}
	start := time.Now()
	makers, ctx := errgroup.WithContext(s.Context())
	makers.SetLimit(8)
	prefix := map[bool]string{true: "in", false: "un"}[grouped]
	for i := range groups {
		name, n, memory := fmt.Sprintf("%s-%d", prefix, i), 2+random.IntN(largest-1), []int64{4, 8, 16}[random.IntN(3)]
		size[name] = n
		makers.Go(func() error {
			for j := range n {
				pod := s.pod(fmt.Sprintf("%s-%d", name, j), memory, in(name, n))
				if !grouped {
					pod.Annotations = nil
				}
				if _, err := s.bed.Client.CoreV1().Pods(s.name).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
					return err
				}
			}
			for j := range 3 {
				single := s.pod(fmt.Sprintf("single-%s-%d", name, j), 2)
				if _, err := s.bed.Client.CoreV1().Pods(s.name).Create(ctx, single, metav1.CreateOptions{}); err != nil {
					return err
				}
			}
			return nil
		})
	}
	ran, partial := map[string]int{}, map[string]time.Time{}
	s.within(time.Duration(form(4, 20))*time.Minute, "every group has run", func(ctx context.Context) error {
		pods, err := s.pods(ctx)
		if err != nil {
			return err
		}
		s.checkCards()
		bound := map[string]int{}
		for i := range pods {
			if pods[i].Spec.NodeName == "" || pods[i].DeletionTimestamp != nil {
				continue
			}
			group := pods[i].Labels["group"]
			if grouped && group != "" {
				bound[group]++
				continue
			}
			if err := s.end(ctx, &pods[i]); err != nil {
				return err
			}
			ran[group]++
		}
		done := 0
		for group, n := range size {
			switch {
			case ran[group] == n:
				done++
			case bound[group] == n:
				ran[group] = n
				s.removeGroup(group)
			case bound[group] > 0:
				// Members that are being bound one after the other are no group at rest.
				if partial[group].IsZero() {
					partial[group] = time.Now()
				} else if ago := time.Since(partial[group]); ago > 20*time.Second {
					s.Errorf("group %s has been bound in part for %v: %d of %d", group, ago, bound[group], n)
				}
			default:
				delete(partial, group)
			}
		}
		if done < groups {
			return fmt.Errorf("%d of %d have; %s", done, groups, strings.TrimSpace(s.waiting(ctx)))
		}
		return nil
	})
	took := time.Since(start)
	must(s, makers.Wait())
	must(s, s.sweep(s.Context()))
	return took
}

func (s *stage) end(ctx context.Context, pod *corev1.Pod) error {
	return s.bed.Client.CoreV1().Pods(s.name).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
	})
}

// TestWholeCards: groups that ask for nvidia.com/gpu are counted and held back too, and kube-scheduler finds their places.
func TestWholeCards(t *testing.T) {
	o := testbed.Options{MemoryUnit: "GiB", ExtenderArgs: []string{"--gang-hold=2s"}}
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
	s.create("c-0", 0, in("c", 2), wholeCard)
	s.refused("c", 1, "1 of 2 members exist")
}

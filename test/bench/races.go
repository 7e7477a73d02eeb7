package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// burst is the number of pods that are created at once, and so about the number of concurrent binds.
const burst = 32

// races fills the cards to a part of their memory, then creates and deletes pods in bursts at that level. It counts the
// binds that failed because another pod took the card between filter and bind.
func (s *bench) races(ctx context.Context, k *kind, full float64, capacity gpu.Memory, pods int, seed int64) (t result, err error) {
	extender, err := k.start(ctx)
	if err != nil {
		return t, err
	}
	if err := s.startScheduler(ctx, extender, k.edits); err != nil {
		return t, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	churn := &churn{bench: s, random: rand.New(rand.NewPCG(uint64(seed), 1)), requests: map[string]gpu.Memory{}, bound: map[string]bool{}}
	if err := s.watchBound(ctx, churn.addBound); err != nil {
		return t, err
	}
	level := gpu.Memory(full * float64(capacity))
	for churn.sum < level {
		if err := churn.createPods(ctx, burst); err != nil {
			return t, err
		}
	}
	if err := churn.waitForPending(ctx); err != nil {
		return t, err
	}
	start := time.Now()
	for made := 0; made < pods; made += burst {
		if err := churn.deletePods(ctx, level); err != nil {
			return t, err
		}
		if err := churn.createPods(ctx, burst); err != nil {
			return t, err
		}
	}
	if err := churn.waitForPending(ctx); err != nil {
		return t, err
	}
	t.rate = float64(pods) / time.Since(start).Seconds()
	if err := s.countCards(ctx, &t); err != nil {
		return t, err
	}
	if err := extender.finish(ctx, &t); err != nil {
		return t, err
	}
	if err := s.plane.Scheduler.Kill(); err != nil {
		return t, err
	}
	return t, s.clear(ctx, metav1.NamespaceDefault)
}

// churn creates and deletes pods and counts their requests.
type churn struct {
	*bench
	random *rand.Rand
	made   int
	// requests are the requests of the existing pods, sum their total.
	requests map[string]gpu.Memory
	sum      gpu.Memory

	mu sync.Mutex
	// bound are the pods that have a node.
	bound map[string]bool
}

func (c *churn) addBound(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bound[name] = true
}

// createPods creates pods of up to half a card, all at once.
func (c *churn) createPods(ctx context.Context, pods int) error {
	g, creating := errgroup.WithContext(ctx)
	for range pods {
		request := 512 + gpu.Memory(c.random.Int64N(int64(cardMemory)/2-512))
		pod := newPod(c.made, podSize{memory: request, cards: 1})
		c.made++
		c.requests[pod.Name] = request
		c.sum = c.sum.Add(request)
		g.Go(func() error {
			_, err := c.plane.Client.CoreV1().Pods(metav1.NamespaceDefault).Create(creating, pod, metav1.CreateOptions{})
			return err
		})
	}
	return g.Wait()
}

// deletePods waits until few pods are pending, then deletes bound ones until a burst has room below the level.
func (c *churn) deletePods(ctx context.Context, level gpu.Memory) error {
	err := wait.PollUntilContextTimeout(ctx, 5*time.Millisecond, 5*time.Second, true, func(context.Context) (bool, error) {
		return c.pending() < 2*burst, nil
	})
	if err != nil && ctx.Err() != nil {
		return ctx.Err()
	}
	g, deleting := errgroup.WithContext(ctx)
	for name, request := range c.requests { // Map order, which is random.
		if c.sum+burst*cardMemory/4 <= level {
			break
		}
		c.mu.Lock()
		bound := c.bound[name]
		delete(c.bound, name)
		c.mu.Unlock()
		if !bound {
			continue
		}
		delete(c.requests, name)
		c.sum = c.sum.Sub(request)
		g.Go(func() error {
			return c.plane.Client.CoreV1().Pods(metav1.NamespaceDefault).Delete(deleting, name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)})
		})
	}
	return g.Wait()
}

func (c *churn) pending() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.requests) - len(c.bound)
}

// waitForPending waits until no pod is pending, or none was bound for five seconds: at a level of 95%, some find no
// card.
func (c *churn) waitForPending(ctx context.Context) error {
	last, since := c.pending(), time.Now()
	return wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, func(context.Context) (bool, error) {
		if now := c.pending(); now != last {
			last, since = now, time.Now()
		}
		return last == 0 || time.Since(since) > 5*time.Second, nil
	})
}

// measureRaces runs the kinds at each level.
func measureRaces(ctx context.Context, s *bench, kinds []*kind, o options) error {
	capacity := gpu.Memory(o.nodes*o.cards) * cardMemory
	for _, full := range o.full {
		for _, k := range kinds {
			if k.start == nil {
				return fmt.Errorf("-full: %q has no extender that can report conflicts", k.name)
			}
			t, err := s.races(ctx, k, full, capacity, o.pods, o.seed)
			if err != nil {
				return fmt.Errorf("%s at %.0f%%: %w", k.name, 100*full, err)
			}
			fmt.Printf("%-12s %3.0f%% full   %7.1f pods/s   %d binds, %d failed because the card was taken (%.2f%%)%s\n",
				k.name, 100*full, t.rate, t.binds, t.conflicts, 100*float64(t.conflicts)/float64(max(t.binds, 1)), t.extra())
		}
	}
	return nil
}

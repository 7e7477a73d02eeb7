package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// bench holds the control plane on which all kinds run.
type bench struct {
	options
	plane *controlplane.ControlPlane
	dir   string
}

// creators is the number of concurrent creations: enough that they are not the bottleneck.
const creators = 16

// run measures one kind: it starts the extender and the scheduler, creates the pods (rate per second, or as fast as possible if
// it is 0), waits until they are bound, and deletes everything.
func (s *bench) run(ctx context.Context, k *kind, pods []gpu.Memory, rate float64) (t result, err error) {
	extender, err := s.begin(ctx, k)
	if err != nil {
		return t, err
	}
	former, err := s.readCycles(ctx)
	if err != nil {
		return t, err
	}
	before := spent()
	if t, err = s.bindAll(ctx, pods, k.measuredGate(), rate); err != nil {
		return t, err
	}
	t.ready = extender.ready
	t.everything = spent().since(before)
	all, err := s.readCycles(ctx)
	if err != nil {
		return t, err
	}
	t.cycle = all.since(former).mean()
	t.all = t.everything.total()
	if extender.url != "" {
		if err := s.countCards(ctx, &t); err != nil {
			return t, err
		}
	}
	return t, s.end(ctx, k, extender, &t)
}

// begin creates the pods of the kind that wait, and starts its extender and the scheduler. It returns when kube-scheduler has rejected each of
// the waiting pods, unless they have a gate.
func (s *bench) begin(ctx context.Context, k *kind) (extender running, err error) {
	if k.waiting {
		if err := s.createWaiting(ctx, k.gate); err != nil {
			return running{}, err
		}
	}
	extender.finish = func(context.Context, *result) error { return nil }
	if k.start != nil {
		if extender, err = k.start(ctx); err != nil {
			return running{}, err
		}
	}
	if err := s.startScheduler(ctx, extender, k.edits); err != nil {
		return running{}, err
	}
	if k.waiting && k.gate == "" {
		return extender, s.awaitTried(ctx)
	}
	return extender, nil
}

// end adds the extender's metrics to the result, stops the extender and the scheduler, and deletes all pods.
func (s *bench) end(ctx context.Context, k *kind, extender running, t *result) error {
	if err := extender.finish(ctx, t); err != nil {
		return err
	}
	if err := s.plane.Scheduler.Kill(); err != nil {
		return err
	}
	if k.waiting {
		if err := s.clear(ctx, append(tenantNames(s.tenants), namespaceFull)...); err != nil {
			return err
		}
	}
	return s.clear(ctx, metav1.NamespaceDefault)
}

// startScheduler starts kube-scheduler with this extender, with a client rate limit high enough not to be the
// bottleneck.
func (s *bench) startScheduler(ctx context.Context, extender running, edits []controlplane.ConfigEdit) error {
	return s.plane.StartScheduler(ctx, controlplane.SchedulerOptions{
		ExtenderURL: extender.url, ConfigFile: extender.schedulerConfig,
		Edits: append([]controlplane.ConfigEdit{controlplane.ClientLimits(5000, 10000)}, edits...),
	})
}

// bindAll creates the pods and waits until all are bound. They have the scheduling gate, unless it is empty.
func (s *bench) bindAll(ctx context.Context, sizes []gpu.Memory, gate string, rate float64) (result, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	times := newTimes(len(sizes))
	if err := s.watchBound(ctx, times.bound); err != nil {
		return result{}, err
	}
	pods := s.plane.Client.CoreV1().Pods(metav1.NamespaceDefault)
	start := time.Now()
	g, creating := errgroup.WithContext(ctx)
	g.SetLimit(creators)
	next := pace(creating, rate)
	for i, size := range sizes {
		next()
		g.Go(func() error {
			pod := newPod(i, size)
			pod.Spec.SchedulingGates = gates(gate)
			times.created(pod.Name)
			_, err := pods.Create(creating, pod, metav1.CreateOptions{})
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return result{}, err
	}
	select {
	case <-times.all:
	case <-ctx.Done():
		return result{}, ctx.Err()
	}
	sorted := times.sorted()
	return result{
		rate: float64(len(sizes)) / time.Since(start).Seconds(),
		p50:  sorted[len(sorted)/2], p99: sorted[len(sorted)*99/100],
	}, nil
}

// times are the creation times of pods, and the times until they were bound.
type times struct {
	// all is closed when every pod is bound.
	all  chan struct{}
	want int

	mu   sync.Mutex
	from map[string]time.Time
	took map[string]time.Duration
}

func newTimes(want int) *times {
	return &times{all: make(chan struct{}), want: want, from: map[string]time.Time{}, took: map[string]time.Duration{}}
}

func (t *times) created(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.from[name] = time.Now()
}

func (t *times) bound(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	from, known := t.from[name]
	if _, again := t.took[name]; again || !known {
		return
	}
	t.took[name] = time.Since(from)
	if len(t.took) == t.want {
		close(t.all)
	}
}

func (t *times) sorted() []time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Sorted(maps.Values(t.took))
}

// countCards computes the cards in use and their packing from the pods' annotations.
func (s *bench) countCards(ctx context.Context, t *result) error {
	list, err := s.plane.Client.CoreV1().Pods(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	used := map[string]gpu.Memory{}
	for i := range list.Items {
		pod := &list.Items[i]
		where, err := protocol.PodPlacement(pod)
		if errors.Is(err, protocol.ErrNotAssumed) {
			continue
		} else if err != nil {
			return fmt.Errorf("pod %s: %w", pod.Name, err)
		}
		for _, share := range where {
			key := fmt.Sprintf("%s/%d", pod.Spec.NodeName, share.Card)
			used[key] = used[key].Add(share.Memory)
		}
	}
	var sum gpu.Memory
	for card, memory := range used {
		if memory > cardMemory {
			return fmt.Errorf("card %s has %d of %d MiB allocated", card, memory, cardMemory)
		}
		sum = sum.Add(memory)
	}
	if len(used) > 0 {
		t.cards, t.packing = len(used), float64(sum)/float64(cardMemory)/float64(len(used))
	}
	return nil
}

// clear deletes all pods of the namespaces and waits until they are gone.
func (s *bench) clear(ctx context.Context, namespaces ...string) error {
	for _, namespace := range namespaces {
		err := s.plane.Client.CoreV1().Pods(namespace).DeleteCollection(ctx, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{})
		if err != nil {
			return err
		}
	}
	return wait.PollUntilContextCancel(ctx, 100*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		for _, namespace := range namespaces {
			list, err := s.plane.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{Limit: 1})
			if err != nil || len(list.Items) > 0 {
				return false, err
			}
		}
		return true, nil
	})
}

func newPod(i int, request gpu.Memory) *corev1.Pod {
	return framework.MakePod(fmt.Sprintf("pod-%05d", i)).GPUMem(int64(request)).Obj()
}

// watchBound calls bound for each change of a bound pod of the default namespace, until ctx ends. It returns once it follows the pods.
func (s *bench) watchBound(ctx context.Context, bound func(name string)) error {
	return framework.WatchPods(ctx, s.plane.Client, func(pod *corev1.Pod) {
		if pod.Spec.NodeName != "" {
			bound(pod.Name)
		}
	})
}

package gang

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// podWatch follows the pods of the namespace by a watch. It sees every state that the API server has, so that even a
// short over-allocation is found, and is cheaper than frequent lists.
type podWatch struct {
	stop func()

	mu   sync.Mutex
	pods map[string]*corev1.Pod
	// boundAt is when the watch first showed each pod bound. It keeps deleted pods.
	boundAt map[string]time.Time
	cards   map[string]gpu.Memory
	found   []string
}

// watchPods starts a watch of the pods that are created from now on.
func (f *fixture) watchPods() *podWatch {
	w := &podWatch{pods: map[string]*corev1.Pod{}, boundAt: map[string]time.Time{}, cards: map[string]gpu.Memory{}}
	lw := cache.NewListWatchFromClient(f.Cluster.Client.CoreV1().RESTClient(), "pods", f.ID, fields.Everything())
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(lw, f.Cluster.Client), ObjectType: &corev1.Pod{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(pod any) { w.update(nil, pod.(*corev1.Pod)) },
			UpdateFunc: func(old, pod any) { w.update(old.(*corev1.Pod), pod.(*corev1.Pod)) },
			DeleteFunc: func(pod any) {
				if last, ok := pod.(cache.DeletedFinalStateUnknown); ok {
					pod = last.Obj
				}
				w.update(pod.(*corev1.Pod), nil)
			},
		},
	})
	ctx, cancel := context.WithCancel(f.Context())
	var running sync.WaitGroup
	running.Go(func() { informer.RunWithContext(ctx) })
	w.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
	})
	f.Cleanup(w.stop)
	f.Eventually("the watch is synced", func(context.Context) error {
		if !informer.HasSynced() {
			return errors.New("not synced")
		}
		return nil
	})
	return w
}

// update replaces the old state of a pod by the new one. Either may be nil.
func (w *podWatch) update(old, pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if old != nil {
		delete(w.pods, old.Name)
		w.addMemory(old, func(of, what gpu.Memory) gpu.Memory { return of - what })
	}
	if pod != nil {
		w.pods[pod.Name] = pod
		if _, known := w.boundAt[pod.Name]; !known && pod.Spec.NodeName != "" {
			w.boundAt[pod.Name] = time.Now()
		}
		w.addMemory(pod, func(of, what gpu.Memory) gpu.Memory { return of + what })
	}
}

// addMemory adds the allocations of a bound pod to the cards, or subtracts them. The caller holds the lock.
func (w *podWatch) addMemory(pod *corev1.Pod, change func(of, what gpu.Memory) gpu.Memory) {
	if pod.Spec.NodeName == "" {
		return
	}
	where, err := protocol.PodPlacement(pod)
	if err != nil {
		w.found = append(w.found, fmt.Sprintf("%s: %v", pod.Name, err))
	}
	for _, share := range where {
		name := fmt.Sprintf("%s card %d", pod.Spec.NodeName, share.Card)
		w.cards[name] = change(w.cards[name], share.Memory)
		if w.cards[name] > card {
			w.found = append(w.found, fmt.Sprintf("%s has %d of %d allocated", name, w.cards[name], card))
		}
	}
}

// bound returns the pods that are bound and not terminating.
func (w *podWatch) bound() (pods []*corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, pod := range w.pods {
		if pod.Spec.NodeName != "" && pod.DeletionTimestamp == nil {
			pods = append(pods, pod)
		}
	}
	return pods
}

// whenBound returns when each pod was bound.
func (w *podWatch) whenBound() map[string]time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.boundAt)
}

// violations returns the errors that were found.
func (w *podWatch) violations() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.found)
}

// pendingReasons returns the scheduler's messages on the pending pods, with their numbers.
func (w *podWatch) pendingReasons() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var pods []corev1.Pod
	for _, pod := range w.pods {
		pods = append(pods, *pod)
	}
	return reasons(pods)
}

// shares are fractions of the memory of all cards: of bound pods, of all allocations, and requested by pending pods.
type shares struct{ bound, allocated, requested float64 }

// shares returns the present shares.
func (w *podWatch) shares(f *fixture, total gpu.Memory) (shares, error) {
	ledger, err := f.Cluster.LedgerAllocations(f.Context())
	if err != nil {
		return shares{}, err
	}
	var held, bound, wanted gpu.Memory
	for node, cards := range ledger {
		for _, card := range cards {
			if strings.HasSuffix(node, f.ID) {
				held += gpu.Memory(card.Used)
			}
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, pod := range w.pods {
		if pod.Spec.NodeName == "" {
			wanted += protocol.PodRequest(pod)
		} else {
			bound += protocol.PodRequest(pod)
		}
	}
	part := func(m gpu.Memory) float64 { return float64(m) / float64(total) }
	return shares{part(bound), part(held), part(wanted)}, nil
}

// measureShares reads the shares each second while on is true. The returned function stops that and returns the means. It fails the
// test if there was nothing to measure.
func (f *fixture) measureShares(w *podWatch, total gpu.Memory, on *atomic.Bool) (means func() shares) {
	ctx, cancel := context.WithCancel(f.Context())
	var running sync.WaitGroup
	var sum shares
	n := 0.0
	begin := time.Now()
	running.Go(func() {
		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			now, err := w.shares(f, total)
			if err != nil {
				continue // If the extender fails, the test's own calls fail too.
			}
			if on.Load() {
				sum, n = shares{sum.bound + now.bound, sum.allocated + now.allocated, sum.requested + now.requested}, n+1
			}
			if i%30 == 0 {
				f.Logf("after %v: %.0f%% bound, %.0f%% allocated, %.0f%% requested by pending pods", time.Since(begin).Round(time.Second), 100*now.bound, 100*now.allocated, 100*now.requested)
			}
		}
	})
	return func() shares {
		cancel()
		running.Wait()
		if n == 0 {
			f.Fatal("no shares were measured")
		}
		return shares{sum.bound / n, sum.allocated / n, sum.requested / n}
	}
}

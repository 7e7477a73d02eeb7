package clustercache

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

const (
	// syncPatience is how long the first lists may take before the reason for the delay is logged.
	syncPatience = 5 * time.Second
	probeTimeout = 3 * time.Second
)

// ErrNotSynced means that nodes and pods are still being listed.
var ErrNotSynced = errors.New("the cache is not synced yet: nodes and pods are still being listed")

// consistent makes the first list include every write that was made before it. If the API server cannot stream that
// list, informers ask for any state in the API server's cache (resourceVersion 0). That state can be older than the
// last binds of a former extender. Later lists are never older than what the informer has received.
func consistent(options *metav1.ListOptions) {
	if options.ResourceVersion == "0" {
		options.ResourceVersion = ""
	}
}

// Ready returns nil once the handler has received the first lists of pods and nodes. Before, it returns an error that
// wraps ErrNotSynced and includes the cause of the delay if it is known.
func (c *Cache) Ready() error {
	if len(c.synced) == 0 {
		return ErrNotSynced
	}
	for _, synced := range c.synced {
		if synced() {
			continue
		}
		if hindrance := c.hindrance.Load(); hindrance != nil {
			return fmt.Errorf("%w: %w", ErrNotSynced, *hindrance)
		}
		return ErrNotSynced
	}
	return nil
}

// AwaitReady waits until the cache is synced. If ctx ends before, it returns the error of Ready.
func (c *Cache) AwaitReady(ctx context.Context) error {
	select {
	case <-c.ready:
		return nil
	case <-ctx.Done():
		return cmp.Or(c.Ready(), ctx.Err())
	}
}

// BudgetsSynced reports whether the disruption budgets are listed. Ready doesn't wait for them.
func (c *Cache) BudgetsSynced() bool { return c.budgetsSynced() }

// Run starts the informers, which run until ctx ends, and returns once the cache is synced. If that takes long it logs
// the cause, which informers do not report. It must be called once.
//
// Run does not wait for the informers to stop: a reflector that cannot reach the API server sleeps through its back-off
// of up to half a minute and ignores its context (k8s.io/client-go tools/cache/reflector.go, watchList).
func (c *Cache) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	start := c.Clock.Now()
	waited := make(chan struct{})
	waiting, stopWaiting := context.WithCancel(ctx)
	go func() {
		defer close(waited)
		defer stopWaiting() // A probe can take long.
		c.startPodGroups(ctx)
		c.factory.StartWithContext(ctx)
		cache.WaitForCacheSync(ctx.Done(), c.synced...)
	}()
	ticker := c.Clock.NewTicker(syncPatience)
	defer ticker.Stop()
	for {
		select {
		case <-waited:
			if ctx.Err() != nil {
				return nil
			}
			c.handler.Synced()
			close(c.ready)
			took := c.Clock.Since(start)
			if c.CacheSynced != nil {
				c.CacheSynced(took)
			}
			logger.Info("The cache is synced", "after", took.Round(time.Millisecond))
			// The first lists arrive whole and are several times larger than what is kept of them. Without this call, the
			// process would keep that memory for minutes.
			debug.FreeOSMemory()
			return nil
		case <-ticker.C():
		}
		if err := c.probe(waiting); err != nil && waiting.Err() == nil {
			c.hindrance.Store(&err)
			logger.Info("Waiting for the API server to list nodes and pods", "reason", err.Error())
		}
	}
}

// probe lists what the informers list.
func (c *Cache) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	one := metav1.ListOptions{Limit: 1}
	if _, err := c.Client.CoreV1().Nodes().List(ctx, one); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	if _, err := c.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, one); err != nil {
		return fmt.Errorf("listing pods: %w", err)
	}
	if c.namespaces {
		if _, err := c.Client.CoreV1().Namespaces().List(ctx, one); err != nil {
			return fmt.Errorf("listing namespaces: %w", err)
		}
	}
	return c.listPodGroups(ctx, one)
}

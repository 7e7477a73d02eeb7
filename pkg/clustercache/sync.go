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
	select {
	case <-c.ready:
		return nil
	default:
	}
	if hindrance := c.hindrance.Load(); hindrance != nil {
		return fmt.Errorf("%w: %w", ErrNotSynced, *hindrance)
	}
	return ErrNotSynced
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

// Run starts the informers, which run until ctx ends, and returns once the cache is synced, or ctx ends. It must be called once.
//
// Run does not wait for the informers to stop: a reflector that cannot reach the API server sleeps through its back-off
// of up to half a minute and ignores its context (k8s.io/client-go tools/cache/reflector.go, watchList).
func (c *Cache) Run(ctx context.Context) error {
	start := c.Clock.Now()
	c.watchPodGroups(ctx)
	c.factory.StartWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), c.synced...) {
		return nil
	}
	c.handler.Synced()
	close(c.ready)
	took := c.Clock.Since(start)
	if c.CacheSynced != nil {
		c.CacheSynced(took)
	}
	klog.FromContext(ctx).Info("The cache is synced", "after", took.Round(time.Millisecond))
	// The first lists arrive whole and are several times larger than what is kept of them. Without this call, the
	// process would keep that memory for minutes.
	debug.FreeOSMemory()
	return nil
}

// listFailed logs why an informer can't list or watch its objects, and keeps it for Ready.
func (c *Cache) listFailed(ctx context.Context, reflector *cache.Reflector, err error) {
	cache.DefaultWatchErrorHandler(ctx, reflector, err)
	c.hindrance.Store(&err)
}

package cluster

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync/atomic"
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

// consistent makes the first list include every write that was made before it. If the API server cannot stream that
// list, informers ask for any state in the API server's cache (resourceVersion 0). That state can be older than the
// last binds of a former extender. Later lists are never older than what the informer has received.
func consistent(options *metav1.ListOptions) {
	if options.ResourceVersion == "0" {
		options.ResourceVersion = ""
	}
}

// syncState is the progress of the cache sync.
type syncState struct {
	synced []cache.InformerSynced
	// budgets reports whether the disruption budgets are listed. Only preempt waits for that.
	budgets cache.InformerSynced
	// hindrance is why listing from the API server fails; nil if no failure is known.
	hindrance atomic.Pointer[error]
}

// Ready returns nil once the cache is synced. Before, it returns an error that wraps ErrNotReady and includes the cause
// of the delay if it is known.
func (c *Cluster) Ready() error {
	for _, synced := range c.sync.synced {
		if synced() {
			continue
		}
		if hindrance := c.sync.hindrance.Load(); hindrance != nil {
			return fmt.Errorf("%w: %w", ErrNotReady, *hindrance)
		}
		return ErrNotReady
	}
	return nil
}

// awaitLedger waits until the cache is synced. If that takes long it logs the cause, which informers do not report.
func (c *Cluster) awaitLedger(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	start := c.Clock.Now()
	stands := make(chan struct{})
	go func() {
		defer close(stands)
		cache.WaitForCacheSync(ctx.Done(), c.sync.synced...)
	}()
	ticker := c.Clock.NewTicker(syncPatience)
	defer ticker.Stop()
	for {
		select {
		case <-stands:
			if ctx.Err() == nil {
				if c.Leading == nil {
					c.inheritRefusals() // With replicas, the leader does so at each TakeOver.
				}
				took := c.Clock.Since(start)
				c.Observer.CacheSynced(took)
				logger.Info("The ledger stands", "after", took.Round(time.Millisecond))
				// The first lists arrive whole and are several times larger than what is kept of them. Without this
				// call, the process would keep that memory for minutes.
				debug.FreeOSMemory()
			}
			return nil
		case <-ticker.C():
		}
		if err := c.probe(ctx); err != nil {
			c.sync.hindrance.Store(&err)
			logger.Info("Waiting for the API server to list nodes and pods", "reason", err.Error())
		}
	}
}

// probe lists what the informers list.
func (c *Cluster) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	one := metav1.ListOptions{Limit: 1}
	if _, err := c.Client.CoreV1().Nodes().List(ctx, one); err != nil {
		return fmt.Errorf("listing nodes: %w", err)
	}
	if _, err := c.Client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, one); err != nil {
		return fmt.Errorf("listing pods: %w", err)
	}
	return nil
}

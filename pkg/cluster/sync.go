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
	// syncPatience is how long the first lists may take before somebody is told why.
	syncPatience = 5 * time.Second
	probeTimeout = 3 * time.Second
)

// consistent has the first list tell of all that was written before it. Where an API server can't stream it, informers
// would ask for any state that a server has in its cache (resourceVersion 0), which can be one from before the last binds
// of a former extender. Later lists are never older than what the informer has seen.
func consistent(options *metav1.ListOptions) {
	if options.ResourceVersion == "0" {
		options.ResourceVersion = ""
	}
}

// syncState is how far the ledger's rebuilding has come.
type syncState struct {
	synced []cache.InformerSynced
	// budgets says whether the disruption budgets are known, which preempt alone waits for.
	budgets cache.InformerSynced
	// hindrance is why the API server can't be listed, as far as that is known.
	hindrance atomic.Pointer[error]
}

// Ready returns nil once the ledger stands; before, an error that wraps ErrNotReady and says what hinders it, where
// that is known.
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

// awaitLedger waits until the ledger stands, and says why where that takes long: the informers keep it to themselves.
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
					c.inheritRefusals() // Among replicas the leader does so, at each TakeOver.
				}
				took := c.Clock.Since(start)
				c.Observer.CacheSynced(took)
				logger.Info("The ledger stands", "after", took.Round(time.Millisecond))
				// The lists came whole: several times of what is kept, which would stay with this process for minutes.
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

// probe asks for what the informers ask for.
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

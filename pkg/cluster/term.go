package cluster

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// drainInterval is how often a stopping leader checks whether its writes have ended.
const drainInterval = 20 * time.Millisecond

// term records which nodes a leader has confirmed. A leader can answer calls before its watch has reported the last
// binds of the former leader. Therefore the pods of a node are listed once per term from the API server, before the
// first bind to that node. An extender without replicas has no terms: a former extender has ended before this one lists
// the pods, see consistent.
type term struct {
	mu sync.Mutex
	// number counts the terms. It is 0 before the first one, and always for an extender without replicas.
	number uint64
	// confirmed are the nodes whose pods were listed in this term.
	confirmed map[string]struct{}
}

func (t *term) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.number++
	t.confirmed = map[string]struct{}{}
}

// isConfirmed reports whether the node was listed in the current term, whose number it returns. Without terms every
// node is confirmed.
func (t *term) isConfirmed(node string) (number uint64, confirmed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, confirmed = t.confirmed[node]
	return t.number, confirmed || t.number == 0
}

// confirm records that the node was listed, unless the list began in an earlier term.
func (t *term) confirm(node string, number uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if number == t.number {
		t.confirmed[node] = struct{}{}
	}
}

// TakeOver begins a term as leader. At the time of the call, a read must show every write of former leaders.
func (c *Cluster) TakeOver(context.Context) error {
	if err := c.Ready(); err != nil {
		return err
	}
	c.term.begin()
	c.inheritRefusals()
	return nil
}

// Drain waits until no further write of this process can take effect: no bind is in flight, and every unconfirmed bind
// is resolved. No new bind may begin meanwhile.
func (c *Cluster) Drain(ctx context.Context) error {
	err := wait.PollUntilContextCancel(ctx, drainInterval, true, func(context.Context) (bool, error) {
		return c.flights.none() && c.settler.idle(), nil
	})
	if err != nil {
		return fmt.Errorf("waiting for the binds in flight: %w", err)
	}
	return nil
}

// BindDeadline returns how long after the begin of a bind its write may still take effect.
func (c *Cluster) BindDeadline() time.Duration { return c.settler.fence() }

// confirmNode ensures that the ledger has every bind to the node that was made before this term.
func (c *Cluster) confirmNode(ctx context.Context, node string) error {
	number, confirmed := c.term.isConfirmed(node)
	if confirmed {
		return nil
	}
	pods, err := c.API.PodsOn(ctx, node)
	if err != nil {
		return fmt.Errorf("listing the pods of node %s: %w", node, err)
	}
	for i := range pods {
		c.settler.adopt(&pods[i])
	}
	c.term.confirm(node, number)
	klog.FromContext(ctx).V(4).Info("The node's pods are confirmed", "pods", len(pods))
	return nil
}

// adopt adds a pod that a live read found on a node and that the watch has not reported. The bind stays open until the
// watch reports it, so that a pod that has ended meanwhile does not stay in the ledger.
func (s *settler) adopt(pod *corev1.Pod) {
	found := protocol.Pod(pod)
	if found.Request == 0 || protocol.Terminal(pod) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, open := s.open[found.UID]
	home, holder, known := s.ledger.Lookup(found.UID)
	// A pod that the ledger has on another node, or only assumed on this one, was bound by another leader after a bind
	// of this process failed. The other leader may have chosen another card.
	if known && home == pod.Spec.NodeName && holder.State == ledger.Bound || open && !known {
		return
	}
	s.enter(attempt{pod: found, node: pod.Spec.NodeName}, pod)
}

// idle reports whether every write has a known outcome.
func (s *settler) idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, a := range s.open {
		if a.state != unseen {
			return false
		}
	}
	return true
}

func (f *flights) none() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.pods) == 0
}

// leading returns nil if this process may write.
func (c *Cluster) leading() error {
	if c.Leading == nil {
		return nil
	}
	return c.Leading()
}

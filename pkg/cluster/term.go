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

// drainInterval is how often a leader that stops looks whether its writes have ended.
const drainInterval = 20 * time.Millisecond

// term is what a leader knows to be its own. A leader may answer before its watch has told it of the last binds of the
// one before; so in each term, before the first bind to a node, that node's pods are listed once from the API server.
// The only extender has no terms: whoever was before it had ended when it listed the pods, see consistent.
type term struct {
	mu sync.Mutex
	// number counts the terms; 0 where there are none.
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

// isConfirmed says whether the node was listed in the term whose number it returns.
func (t *term) isConfirmed(node string) (number uint64, confirmed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, confirmed = t.confirmed[node]
	return t.number, confirmed || t.number == 0
}

// confirm notes that the node was listed, if that was begun in the present term.
func (t *term) confirm(node string, number uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if number == t.number {
		t.confirmed[node] = struct{}{}
	}
}

// TakeOver begins a term as leader. Every write of former leaders can be read by now.
func (c *Cluster) TakeOver(context.Context) error {
	if err := c.Ready(); err != nil {
		return err
	}
	c.term.begin()
	c.inheritRefusals()
	return nil
}

// Drain waits until no write of this process can appear any more: no bind is in flight, and every lost answer is
// settled. No new bind may begin meanwhile.
func (c *Cluster) Drain(ctx context.Context) error {
	err := wait.PollUntilContextCancel(ctx, drainInterval, true, func(context.Context) (bool, error) {
		return c.flights.none() && c.settler.idle(), nil
	})
	if err != nil {
		return fmt.Errorf("waiting for the binds in flight: %w", err)
	}
	return nil
}

// BindDeadline is how long after a bind began its write may still appear.
func (c *Cluster) BindDeadline() time.Duration { return c.settler.fence() }

// confirmNode makes sure that the ledger knows of every bind to the node that was made before this term.
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

// adopt enters a pod that a live read found on a node, and of which the watch hasn't told. It stays open until the
// watch does, so that a pod that was gone by then doesn't stay in the ledger.
func (s *settler) adopt(pod *corev1.Pod) {
	found := protocol.Pod(pod)
	if found.Request == 0 || protocol.Terminal(pod) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, open := s.open[found.UID]
	home, holder, known := s.ledger.Lookup(found.UID)
	// One that is known elsewhere, or here as no more than reserved, was bound by another leader, after a bind of ours that
	// came to nothing: perhaps to another card.
	if known && home == pod.Spec.NodeName && holder.State == ledger.Bound || open && !known {
		return
	}
	s.enter(attempt{pod: found, node: pod.Spec.NodeName}, pod)
}

// idle says that no write is under way whose outcome isn't known.
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

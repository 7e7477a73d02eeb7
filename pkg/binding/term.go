package binding

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/clustercache"
)

// drainInterval is how often a stopping leader checks whether its writes have ended.
const drainInterval = 20 * time.Millisecond

// termNodes records which nodes a leader has confirmed. A leader can answer calls before its watch has reported the last
// binds of the former leader. Therefore the pods of a node are listed once per term from the API server, before the
// first bind to that node, until the watch has caught up: then every node is confirmed. An extender without replicas has no terms: a former
// extender has ended before this one lists the pods, see package clustercache.
type termNodes struct {
	mu sync.Mutex
	// number counts the terms. It is 0 before the first one, and always for an extender without replicas.
	number uint64
	watch  termWatch
	// confirmed are the nodes whose pods were listed in this term.
	confirmed map[string]struct{}
}

// termWatch is what the watch has reported of the term's own binds, which were made after those of former leaders.
//
//	behind → reporting    the watch reports a bind of this term
//	reporting → caughtUp  it reports a bind that was begun after that
//
// The watch reports changes in their order, so the first report would do. But if the watch was interrupted, it reports a list of all pods, in any
// order, and the report of a bind can precede that of an earlier one. A bind that was begun after the first report isn't in such a list.
type termWatch int

const (
	behind termWatch = iota
	reporting
	caughtUp
)

// termMoment is a moment in a term. The zero value is in no term.
type termMoment struct {
	number uint64
	watch  termWatch
}

func (t *termNodes) begin() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.number++
	t.watch, t.confirmed = behind, map[string]struct{}{}
}

// now returns the present moment.
func (t *termNodes) now() termMoment {
	t.mu.Lock()
	defer t.mu.Unlock()
	return termMoment{t.number, t.watch}
}

// reported records that the watch has reported a bind that was begun at that moment.
func (t *termNodes) reported(begun termMoment) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if begun.number == t.number && begun.number > 0 {
		t.watch = max(t.watch, min(begun.watch+1, caughtUp))
	}
}

// isConfirmed reports whether the ledger has all earlier binds to the node, and returns the number of the current term. Without terms every
// node is confirmed.
func (t *termNodes) isConfirmed(node string) (number uint64, confirmed bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	_, confirmed = t.confirmed[node]
	return t.number, confirmed || t.watch == caughtUp || t.number == 0
}

// confirm records that the node was listed, unless the list began in an earlier term.
func (t *termNodes) confirm(node string, number uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if number == t.number {
		t.confirmed[node] = struct{}{}
	}
}

// BeginTerm begins a term as leader. At the time of the call, a read must show every write of former leaders.
func (b *Binder) BeginTerm() { b.term.begin() }

// Drain waits until no further write of this process can take effect: no bind is in flight, and every unconfirmed bind
// is resolved. No new bind may begin meanwhile.
func (b *Binder) Drain(ctx context.Context) error {
	err := wait.PollUntilContextCancel(ctx, drainInterval, true, func(context.Context) (bool, error) {
		return b.tracker.drained(), nil
	})
	if err != nil {
		return fmt.Errorf("waiting for the binds in flight: %w", err)
	}
	return nil
}

// ConfirmNode ensures that the ledger has every bind to the node that was made before this term. Its error wraps ErrNodeUnknown.
func (b *Binder) ConfirmNode(ctx context.Context, node string) error {
	number, confirmed := b.term.isConfirmed(node)
	if confirmed {
		return nil
	}
	pods, err := b.API.PodsOn(ctx, node)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", ErrNodeUnknown, node, err)
	}
	for i := range pods {
		pod := clustercache.NewPodInfo(&pods[i])
		b.learn(pod.UID, pod)
	}
	b.term.confirm(node, number)
	klog.FromContext(ctx).V(4).Info("The node's pods are confirmed", "pods", len(pods))
	return nil
}

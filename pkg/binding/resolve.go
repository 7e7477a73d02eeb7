package binding

import (
	"context"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

const (
	// resolveInterval is how often unconfirmed binds are read.
	resolveInterval = 500 * time.Millisecond
	// deadlineMargin allows for the network and for etcd, see Deadline.
	deadlineMargin = 5 * time.Second
	// unseenAfter is how long the watch may fail to report a successful bind before the pod is read. The watch never
	// reports a pod that came and went while it was broken.
	unseenAfter = 30 * time.Second
	// readTimeout bounds one live read.
	readTimeout = 2 * time.Second
)

// runResolve resolves unconfirmed binds until ctx ends.
func (b *Binder) runResolve(ctx context.Context) error {
	ticker := b.Clock.NewTicker(resolveInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		b.Resolve(ctx)
	}
}

// Resolve makes one round of Run: it reads the pods of the writes that are due.
func (b *Binder) Resolve(ctx context.Context) {
	for _, w := range b.claims.due(b.Clock.Now()) {
		if !b.resolve(ctx, w) {
			return // The API server is unreachable: each further read would only time out.
		}
	}
}

// resolve reads the pod of one write. It reports whether the API server answered.
func (b *Binder) resolve(ctx context.Context, w *write) bool {
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	// The begin of the read counts: a write that the read does not show can have been made during the read.
	asked := b.Clock.Now()
	found, err := b.reader.read(ctx, w.pod)
	if err != nil {
		logger.V(2).Info("Pod of an open bind not read, trying again", "pod", klog.KRef(w.pod.Namespace, w.pod.Name), "err", err)
		return false
	}
	outcome, resolved := b.claims.applyRead(w, found, asked, Deadline(b.Timeout))
	b.reader.report(w.pod.UID, found)
	if outcome != "" && resolved {
		b.reportResolved(logger, w, outcome)
	}
	return true
}

// watchReported applies what the watch reports of a pod to the ledger, see claims.watchReported. outcome is that of the pod's bind.
func (b *Binder) watchReported(uid gpu.PodUID, outcome reasons.Result, update func()) {
	if w := b.claims.watchReported(uid, update); w != nil {
		b.reportResolved(klog.Background(), w, outcome)
	}
}

// reportResolved reports the outcome of an unconfirmed bind. The ledger must be up to date already.
func (b *Binder) reportResolved(logger klog.Logger, w *write, outcome reasons.Result) {
	logger.Info("Unconfirmed bind resolved", "pod", klog.KRef(w.pod.Namespace, w.pod.Name), "node", w.node, "outcome", outcome)
	b.Observer.BindResolved(outcome)
	switch outcome {
	case reasons.ResultBound:
		b.reportBound(logger.WithValues("pod", klog.KRef(w.pod.Namespace, w.pod.Name), "node", w.node), w)
	case reasons.ResultNotBound:
		b.reader.notBound(w.pod.UID)
	}
}

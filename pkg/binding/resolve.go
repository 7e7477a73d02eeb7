package binding

import (
	"cmp"
	"context"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

const (
	// resolveInterval is how often unconfirmed binds are read.
	resolveInterval = 500 * time.Millisecond
	// deadlineMargin allows for the network and for etcd, see Deadline.
	deadlineMargin = 5 * time.Second
	// unreportedAfter is how long the watch may fail to report a successful bind before the pod is read. The watch never
	// reports a pod that came and went while it was broken.
	unreportedAfter = 30 * time.Second
	// readTimeout bounds one live read.
	readTimeout = 2 * time.Second
)

// A write whose answer is lost may have been made, and may still be made. Its allocation stays, and the pod is read every resolveInterval until it is
// bound or gone, or until Deadline is over: then the write can't be made any more, and the allocation is released. The watch, or the next bind of the
// pod, can find the outcome first.

// answerLost records that the answer was lost, and that a read has shown no outcome. It forgets earlier writes, because their deadlines end
// before that of this one.
func (t *tracker) answerLost(w *write) (open bool) {
	return t.answered(w, func(*trackedPod) { w.state, w.earlier = unconfirmed, nil })
}

// Resolve resolves unconfirmed binds: it reads the pods of the writes that are due. Run calls it every resolveInterval.
func (b *Binder) Resolve(ctx context.Context) {
	for _, w := range b.tracker.due(b.Clock.Now()) {
		if !b.resolve(ctx, w) {
			return // If the API server is unreachable, each further read would only time out. If not, this pod comes last from now on.
		}
	}
}

// due returns the writes whose pods must be read now: first those whose reads never failed, the oldest first, then the others, the earliest failure first.
// So a pod that can never be read delays no other for long. A bind in flight finds the outcome itself.
func (t *tracker) due(now time.Time) (due []*write) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, pod := range t.pods {
		if w := pod.open; pod.state == idle && (w.state == unconfirmed || now.Sub(w.at) > unreportedAfter) {
			due = append(due, w)
		}
	}
	slices.SortFunc(due, func(a, b *write) int {
		return cmp.Or(a.readFailed.Compare(b.readFailed), a.at.Compare(b.at), cmp.Compare(a.pod.UID, b.pod.UID))
	})
	return due
}

// resolve reads the pod of one write. It reports whether the read succeeded.
func (b *Binder) resolve(ctx context.Context, w *write) bool {
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	// The begin of the read counts: a write that the read does not show can have been made during the read.
	asked := b.Clock.Now()
	found, err := b.read(ctx, w.pod)
	if err != nil {
		logger.V(2).Info("Pod of an open bind not read, trying again", "pod", klog.KRef(w.pod.Namespace, w.pod.Name), "err", err)
		w.readFailed = asked
		return false
	}
	outcome, lost := b.tracker.applyRead(w, found, asked, Deadline(b.Timeout))
	b.notify(w.pod.UID, found)
	if outcome != "" && lost {
		b.reportResolved(logger, w, outcome)
	}
	return true
}

// applyRead updates the ledger with the result of a read that began at asked; found is nil if there is no such pod. If the pod isn't bound, the
// write is no longer made if it began more than deadline before. applyRead returns the outcome, or "" if there is none yet, and whether the answer to
// the write was lost.
func (t *tracker) applyRead(w *write, found *clustercache.PodInfo, asked time.Time, deadline time.Duration) (outcome reasons.Result, lost bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	pod := t.pods[w.pod.UID]
	if pod == nil || pod.state != idle || pod.open != w {
		return "", false // A retry has begun, which may have read the allocation; or the watch has reported the pod.
	}
	lost = w.state == unconfirmed
	switch {
	case found == nil, found.Ended:
		t.recordGone(pod, w.pod.UID)
		return reasons.ResultGone, lost
	case found.Node != "":
		t.recordBound(pod, found, asked)
		return reasons.ResultBound, lost
	case asked.Sub(w.at) > deadline:
		pod.open = nil
		t.dropUnused(w.pod.UID, true)
		return reasons.ResultNotBound, lost
	}
	return "", false // The write may still be under way.
}

// watchReported applies what the watch reports of a pod to the ledger, see tracker.watchReported. outcome is how the pod's bind ended.
func (b *Binder) watchReported(uid gpu.PodUID, outcome reasons.Result, update func()) {
	resolved := b.tracker.watchReported(uid, update)
	if resolved != nil {
		b.reportResolved(klog.Background(), resolved, outcome)
	}
}

// reportResolved reports the outcome of an unconfirmed bind. The ledger must be up to date already.
func (b *Binder) reportResolved(logger klog.Logger, w *write, outcome reasons.Result) {
	logger.Info("Unconfirmed bind resolved", "pod", klog.KRef(w.pod.Namespace, w.pod.Name), "node", w.node, "outcome", outcome)
	b.Observer.BindResolved(outcome)
	if outcome == reasons.ResultNotBound {
		b.notBound(w.pod.UID)
	}
}

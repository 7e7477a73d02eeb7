package binding

import (
	"context"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// Listener receives what live reads show, and the binds that have failed for certain. Its methods are called after the ledger
// was updated, without a lock, on several goroutines.
//
// A read can be older than what the watch has reported meanwhile. So a listener applies only what never changes back: a pod
// with a node keeps it, a pod that has ended stays so, and a UID that is gone doesn't return.
type Listener interface {
	// PodRead reports that a live read found the pod in this state.
	PodRead(pod *clustercache.PodInfo)
	// PodReadGone reports that a live read found no pod with this UID.
	PodReadGone(uid gpu.PodUID)
	// NotBound reports that a bind of the pod has failed, and that no write can take effect any more: an unconfirmed bind, or one whose
	// allocation was abandoned. Until then the pod fits the node of that bind only, afterwards it may go to any node.
	NotBound(uid gpu.PodUID)
}

// AddListener adds a listener. Listeners are added before the Binder is used by several goroutines.
func (b *Binder) AddListener(listener Listener) { b.listeners = append(b.listeners, listener) }

// read returns the pod as the API server has it; nil if there is none with this UID. The caller updates the ledger and then
// calls notify.
func (b *Binder) read(ctx context.Context, pod gpu.Pod) (*clustercache.PodInfo, error) {
	live, err := b.API.Pod(ctx, pod.Namespace, pod.Name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, err
	case gpu.PodUID(live.UID) != pod.UID:
		return nil, nil
	}
	return clustercache.NewPodInfo(live), nil
}

// notify passes the result of a read to the listeners.
func (b *Binder) notify(uid gpu.PodUID, found *clustercache.PodInfo) {
	for _, listener := range b.listeners {
		if found == nil {
			listener.PodReadGone(uid)
		} else {
			listener.PodRead(found)
		}
	}
}

func (b *Binder) notBound(uid gpu.PodUID) {
	for _, listener := range b.listeners {
		listener.NotBound(uid)
	}
}

// learn applies the result of a read that no open bind asked for.
func (b *Binder) learn(uid gpu.PodUID, found *clustercache.PodInfo) {
	if found != nil {
		b.tracker.addUnreported(found, b.Clock.Now())
	}
	b.notify(uid, found)
}

// maxReads limits the concurrent reads of Verify, and maxVerify the pods that wait for one.
const maxReads, maxVerify = 16, 1024

// Verify reads the pods from the API server, in the background. The results reach the ledger and the listeners. If a read fails, or too many
// pods wait for one, nothing is reported: the caller asks again.
func (b *Binder) Verify(pods []gpu.Pod) {
	for _, pod := range pods {
		select {
		case b.verify <- pod:
		default:
			return
		}
	}
}

// runVerify makes reads of Verify, one at a time, until ctx ends.
func (b *Binder) runVerify(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case pod := <-b.verify:
			b.VerifyPod(ctx, pod)
		}
	}
}

// VerifyPod makes one read of Verify. Only the leader reads: a standby decides nothing.
func (b *Binder) VerifyPod(ctx context.Context, pod gpu.Pod) {
	if b.Leading() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	found, err := b.read(ctx, pod)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Pod not read, trying again", "pod", klog.KRef(pod.Namespace, pod.Name), "err", err)
		return
	}
	b.learn(pod.UID, found)
}

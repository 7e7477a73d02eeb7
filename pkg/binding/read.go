package binding

import (
	"context"
	"sync"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/background"
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

// reader makes live reads of pods and passes the results to the listeners.
type reader struct {
	api       API
	listeners []Listener
}

// read returns the pod as the API server has it; nil if there is none with this UID. The caller updates the ledger and then
// calls notify.
func (r *reader) read(ctx context.Context, pod gpu.Pod) (*clustercache.PodInfo, error) {
	live, err := r.api.Pod(ctx, pod.Namespace, pod.Name)
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
func (r *reader) notify(uid gpu.PodUID, found *clustercache.PodInfo) {
	for _, listener := range r.listeners {
		if found == nil {
			listener.PodReadGone(uid)
		} else {
			listener.PodRead(found)
		}
	}
}

func (r *reader) notBound(uid gpu.PodUID) {
	for _, listener := range r.listeners {
		listener.NotBound(uid)
	}
}

// AddListener adds a listener. Listeners are added before the Binder is used by several goroutines.
func (b *Binder) AddListener(listener Listener) {
	b.reader.listeners = append(b.reader.listeners, listener)
}

// maxReads limits the concurrent reads of Verify.
const maxReads = 16

// verifications are the pods that Verify must still read. more is raised if there are any. mu guards pods.
type verifications struct {
	mu   sync.Mutex
	pods map[gpu.PodUID]gpu.Pod
	more background.Signal
}

// Verify reads the pods from the API server, in the background. The results reach the ledger and the listeners; a read that
// fails reports nothing.
func (b *Binder) Verify(pods []gpu.Pod) {
	v := b.verifications
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, pod := range pods {
		v.pods[pod.UID] = pod
	}
	v.more.Raise()
}

// take returns the pods to read, and forgets them.
func (v *verifications) take() map[gpu.PodUID]gpu.Pod {
	v.mu.Lock()
	defer v.mu.Unlock()
	pods := v.pods
	v.pods = map[gpu.PodUID]gpu.Pod{}
	return pods
}

// runVerifications makes the reads of Verify until ctx ends.
func (b *Binder) runVerifications(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-b.verifications.more:
			group := new(errgroup.Group)
			group.SetLimit(maxReads)
			for _, pod := range b.verifications.take() {
				group.Go(func() error { b.VerifyPod(ctx, pod); return nil })
			}
			_ = group.Wait() // VerifyPod logs its errors.
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
	found, err := b.reader.read(ctx, pod)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Pod not read, trying again", "pod", klog.KRef(pod.Namespace, pod.Name), "err", err)
		return
	}
	b.learn(pod.UID, found)
}

// learn applies the result of a read that no open bind asked for.
func (b *Binder) learn(uid gpu.PodUID, found *clustercache.PodInfo) {
	if found != nil {
		b.tracker.addUnseen(found, b.Clock.Now())
	}
	b.reader.notify(uid, found)
}

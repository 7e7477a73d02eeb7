package deviceplugin

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// sliceWatch follows the ResourceSlices in which NVIDIA's DRA driver offers the node's cards. Only their existence counts, so it
// reads their metadata.
type sliceWatch struct {
	slices   SliceClient
	selector fields.Selector
	informer cache.SharedIndexInformer
	// unavailable is true if the API server has no ResourceSlices, or the plugin may not read them.
	unavailable atomic.Bool
	changed     func()
}

// newSliceWatch returns a watch that calls changed after each change of what Driver returns.
func newSliceWatch(slices SliceClient, node string, changed func()) (*sliceWatch, error) {
	// Both fields can be selected (k8s.io/kubernetes pkg/registry/resource/resourceslice/strategy.go), and the API server has an
	// index of the first.
	w := &sliceWatch{slices: slices, changed: changed, selector: fields.AndSelectors(
		fields.OneTermEqualSelector("spec.nodeName", node), fields.OneTermEqualSelector("spec.driver", protocol.DRADriver))}
	if slices == nil {
		w.unavailable.Store(true)
		return w, nil
	}
	var err error
	if w.informer, err = newInformer(slices, &metav1.PartialObjectMetadata{}, w.selector, nil, nil); err != nil {
		return nil, fmt.Errorf("setting up the informer of the ResourceSlices: %w", err)
	}
	_, err = w.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed() },
		DeleteFunc: func(any) { changed() },
	})
	if err != nil {
		return nil, fmt.Errorf("following the ResourceSlices: %w", err)
	}
	return w, nil
}

// Driver returns the DRA driver that offers the node's cards, or nothing if none does. It returns false as long as this isn't known.
func (w *sliceWatch) Driver() (name string, known bool) {
	switch {
	case w.unavailable.Load():
		return "", true
	case !w.informer.HasSynced():
		return "", false
	case len(w.informer.GetStore().ListKeys()) == 0:
		return "", true
	}
	return protocol.DRADriver, true
}

// Run follows the ResourceSlices until ctx ends. While they can't be read, it tries again, with a backoff of up to five minutes: API servers
// before 1.34 don't have this version of them, and an informer would ask more often. Both refusals can end: the control plane is
// upgraded, and an API server that starts can refuse a request because its authorizer doesn't know the rights yet.
func (w *sliceWatch) Run(ctx context.Context) {
	if w.slices == nil {
		return
	}
	backoff := wait.Backoff{Duration: 5 * time.Second, Factor: 3, Jitter: 0.2, Steps: 10, Cap: 5 * time.Minute}
	for !w.readable(ctx) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(backoff.Step()):
		}
	}
	w.unavailable.Store(false)
	go func() { // Of an empty list the event handler isn't notified.
		if cache.WaitForCacheSync(ctx.Done(), w.informer.HasSynced) {
			w.changed()
		}
	}()
	w.informer.RunWithContext(ctx)
}

// readable reports whether the plugin can read ResourceSlices.
func (w *sliceWatch) readable(ctx context.Context) bool {
	_, err := w.slices.List(ctx, metav1.ListOptions{FieldSelector: w.selector.String(), Limit: 1})
	switch {
	case err == nil:
		return true
	case ctx.Err() != nil:
	case !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err):
		klog.FromContext(ctx).Error(err, "Could not list the ResourceSlices, trying again")
	case !w.unavailable.Swap(true):
		klog.FromContext(ctx).Info("Can't read ResourceSlices, so a DRA driver on the node is not noticed", "err", err)
		w.changed()
	}
	return false
}

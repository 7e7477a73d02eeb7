package deviceplugin

import (
	"context"
	"fmt"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// sliceWatch follows the ResourceSlices in which NVIDIA's DRA driver offers the node's cards. Only their existence counts, so it
// reads their metadata.
type sliceWatch struct {
	// changed is called when what Driver returns has changed.
	changed func()
	// informer is nil without a client.
	informer cache.SharedIndexInformer
	// unavailable is true if the API server has no ResourceSlices, or the plugin may not read them. Both can end: the control plane is upgraded, and
	// an API server that starts can refuse a request because its authorizer doesn't know the rights yet.
	unavailable atomic.Bool
}

// newSliceWatch returns a watch that calls changed after each change of what Driver returns.
func newSliceWatch(slices SliceClient, node string, changed func()) (*sliceWatch, error) {
	w := &sliceWatch{changed: changed}
	if slices == nil {
		return w, nil
	}
	// Both fields can be selected (k8s.io/kubernetes pkg/registry/resource/resourceslice/strategy.go), and the API server has an
	// index of the first.
	selector := fields.AndSelectors(
		fields.OneTermEqualSelector("spec.nodeName", node), fields.OneTermEqualSelector("spec.driver", protocol.DRADriver))
	var err error
	if w.informer, err = newInformer(slices, &metav1.PartialObjectMetadata{}, selector, nil, nil); err != nil {
		return nil, fmt.Errorf("setting up the informer of the ResourceSlices: %w", err)
	}
	err = w.informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if !apierrors.IsNotFound(err) && !apierrors.IsForbidden(err) {
			cache.DefaultWatchErrorHandler(ctx, r, err)
		} else if !w.unavailable.Swap(true) {
			klog.FromContext(ctx).Info("Can't read ResourceSlices, so a DRA driver on the node is not noticed", "err", err)
			changed()
		}
	})
	if err != nil {
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
	case w.informer == nil:
		return "", true
	case !w.informer.HasSynced():
		return "", w.unavailable.Load()
	case len(w.informer.GetStore().ListKeys()) == 0:
		return "", true
	}
	return protocol.DRADriver, true
}

// Run follows the ResourceSlices until ctx ends.
func (w *sliceWatch) Run(ctx context.Context) {
	if w.informer == nil {
		return
	}
	go func() { // If there is none, nothing else shows that this is known.
		if cache.WaitForCacheSync(ctx.Done(), w.informer.HasSynced) {
			w.changed()
		}
	}()
	w.informer.RunWithContext(ctx)
}

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

// Run follows the ResourceSlices until ctx ends. It returns at once if there are none to follow: API servers before 1.34 don't have
// this version of them, and an informer would ask for them without end.
func (w *sliceWatch) Run(ctx context.Context) {
	if w.slices == nil {
		return
	}
	_, err := w.slices.List(ctx, metav1.ListOptions{FieldSelector: w.selector.String(), Limit: 1})
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		klog.FromContext(ctx).Info("Can't read ResourceSlices, so a DRA driver on the node is not noticed", "err", err)
		w.unavailable.Store(true)
		w.changed()
		return
	}
	w.informer.RunWithContext(ctx)
}

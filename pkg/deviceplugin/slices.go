package deviceplugin

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// newSliceInformer returns an informer of the ResourceSlices in which NVIDIA's DRA driver offers the node's cards. Only their existence counts, so it
// reads their metadata. changed is called when one comes or goes.
func newSliceInformer(slices SliceClient, node string, changed func()) (cache.SharedIndexInformer, error) {
	// Both fields can be selected (k8s.io/kubernetes pkg/registry/resource/resourceslice/strategy.go), and the API server has an
	// index of the first.
	selector := fields.AndSelectors(
		fields.OneTermEqualSelector("spec.nodeName", node), fields.OneTermEqualSelector("spec.driver", protocol.DRADriver))
	informer, err := newInformer(slices, &metav1.PartialObjectMetadata{}, selector, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("setting up the informer of the ResourceSlices: %w", err)
	}
	err = informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if !apierrors.IsNotFound(err) { // API servers before 1.34 have no ResourceSlices of this version. The log must not repeat that.
			cache.DefaultWatchErrorHandler(ctx, r, err)
		}
	})
	if err != nil {
		return nil, fmt.Errorf("setting up the informer of the ResourceSlices: %w", err)
	}
	_, err = informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed() },
		DeleteFunc: func(any) { changed() },
	})
	if err != nil {
		return nil, fmt.Errorf("following the ResourceSlices: %w", err)
	}
	return informer, nil
}

// draDriver returns the DRA driver that offers the node's cards, or nothing if none does. As long as this isn't known, for example because the API
// server has no ResourceSlices, it returns the former one.
func (k *nodeKeeper) draDriver(former string) string {
	switch {
	case !k.slices.HasSynced():
		return former
	case len(k.slices.GetStore().ListKeys()) == 0:
		return ""
	}
	return protocol.DRADriver
}

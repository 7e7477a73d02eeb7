package framework

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// WatchPods calls changed for each pod of the default namespace and each change of it, until ctx ends: one call after the other. It returns once it
// follows the pods.
func WatchPods(ctx context.Context, client kubernetes.Interface, changed func(*corev1.Pod)) error {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(metav1.NamespaceDefault))
	handler, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(pod any) { changed(pod.(*corev1.Pod)) }, // Also of a pod that changed while the watch was broken.
		UpdateFunc: func(_, pod any) { changed(pod.(*corev1.Pod)) },
	})
	if err != nil {
		return err
	}
	factory.StartWithContext(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), handler.HasSynced) {
		return ctx.Err()
	}
	return nil
}

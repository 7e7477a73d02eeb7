package inspect

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// maxDrawsPerSecond limits how often a busy cluster causes a draw. A burst of events is one draw.
const maxDrawsPerSecond = 4

// Watch keeps the objects of the scope in informers. It calls draw with all of them at the start, after changes, and when
// changed or resized receives a value, until ctx ends or draw fails.
func Watch(ctx context.Context, client kubernetes.Interface, scope Scope, changed <-chan struct{}, resized <-chan os.Signal, draw func(Objects) error) error {
	ctx, stop := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()

	nodes := coreinformers.NewFilteredNodeInformer(client, 0, cache.Indexers{}, func(options *metav1.ListOptions) {
		options.LabelSelector = scope.Selector
		if len(scope.Nodes) == 1 {
			options.FieldSelector = "metadata.name=" + scope.Nodes[0]
		}
	})
	pods := coreinformers.NewFilteredPodInformer(client, metav1.NamespaceAll, 0, cache.Indexers{}, func(options *metav1.ListOptions) {
		node := ""
		if len(scope.Nodes) == 1 {
			node = scope.Nodes[0]
		}
		options.FieldSelector = livePods(node)
	})

	events := make(chan struct{}, 1)
	notify := func() {
		select {
		case events <- struct{}{}:
		default: // A draw is already pending.
		}
	}
	for _, informer := range []cache.SharedIndexInformer{nodes, pods} {
		if err := informer.SetTransform(scope.reduce); err != nil {
			return fmt.Errorf("preparing to watch: %w", err)
		}
		// Reachability shows errors to the user. A log line would corrupt the table.
		if err := informer.SetWatchErrorHandlerWithContext(func(context.Context, *cache.Reflector, error) {}); err != nil {
			return fmt.Errorf("preparing to watch: %w", err)
		}
		if _, err := informer.AddEventHandler(cache.FilteringResourceEventHandler{
			FilterFunc: scope.matters,
			Handler: cache.ResourceEventHandlerFuncs{
				AddFunc:    func(any) { notify() },
				UpdateFunc: func(any, any) { notify() },
				DeleteFunc: func(any) { notify() },
			},
		}); err != nil {
			return fmt.Errorf("preparing to watch: %w", err)
		}
		running.Go(func() { informer.RunWithContext(ctx) })
	}

	if !cache.WaitForCacheSync(ctx.Done(), nodes.HasSynced, pods.HasSynced) {
		return nil // ctx has ended.
	}
	notify() // An empty cluster has no events.
	limiter := rate.NewLimiter(maxDrawsPerSecond, 1)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-events:
		case <-changed:
		case <-resized:
		}
		if limiter.Wait(ctx) != nil {
			return nil // ctx has ended.
		}
		if err := draw(scope.objects(nodes.GetStore(), pods.GetStore())); err != nil {
			return err
		}
	}
}

// reduce is the informers' transform. Of a pod that is in no report, it keeps only the identity, which the store needs.
func (s Scope) reduce(object any) (any, error) {
	switch object := object.(type) {
	case *corev1.Node:
		return trimNode(object), nil
	case *corev1.Pod:
		if s.wants(object) {
			return trimPod(object), nil
		}
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
			Namespace: object.Namespace, Name: object.Name, UID: object.UID, ResourceVersion: object.ResourceVersion,
		}}, nil
	}
	return object, nil // A DeletedFinalStateUnknown holds an object that is already reduced.
}

// matters reports whether an event can change the report. Most pods of a cluster ask for no GPU memory.
func (s Scope) matters(object any) bool {
	if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
		object = last.Obj
	}
	switch object := object.(type) {
	case *corev1.Pod:
		return s.wants(object)
	case *corev1.Node:
		return s.covers(object)
	}
	return false
}

// objects reads the stores; the objects are shared with them and must not be changed.
func (s Scope) objects(nodes, pods cache.Store) Objects {
	objects := Objects{Now: time.Now()}
	for _, object := range nodes.List() {
		if node := object.(*corev1.Node); s.covers(node) {
			objects.Nodes = append(objects.Nodes, node)
		}
	}
	for _, object := range pods.List() {
		if pod := object.(*corev1.Pod); s.wants(pod) {
			objects.Pods = append(objects.Pods, pod)
		}
	}
	return objects
}

package simkubelet

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

type operation int

const (
	added operation = iota
	updated
	removed
)

// change is one update from the source of pods. The added pods of one change are admitted as one batch.
type change struct {
	operation operation
	pods      []*corev1.Pod
}

// changeBuffer is the number of changes that can wait during an admission; then the watch blocks (config/config.go).
const changeBuffer = 50

// source computes changes from complete states of pods (config/config.go, merge). A pod counts as updated if its object
// is another one than before.
type source struct {
	changes chan<- change

	seen bool
	pods map[types.UID]*corev1.Pod
}

// merge compares the state with the previous one and sends removals, additions and updates in this order. The first
// state is sent even if it is empty, because it makes the source ready.
func (s *source) merge(ctx context.Context, state []*corev1.Pod) {
	old := s.pods
	s.pods = make(map[types.UID]*corev1.Pod, len(state))
	var adds, updates, removes []*corev1.Pod
	for _, pod := range state {
		s.pods[pod.UID] = pod
		before, known := old[pod.UID]
		switch {
		case !known:
			adds = append(adds, pod)
		case before != pod:
			updates = append(updates, pod)
		}
	}
	for uid, pod := range old {
		if _, still := s.pods[uid]; !still {
			removes = append(removes, pod)
		}
	}
	first := !s.seen
	s.seen = true
	for _, c := range []change{{removed, removes}, {added, adds}, {updated, updates}} {
		if len(c.pods) == 0 && (!first || c.operation != added) {
			continue
		}
		select {
		case s.changes <- c:
		case <-ctx.Done():
			return
		}
	}
}

// watchPods sends the pods bound to the node to the source until ctx ends. As in the kubelet, the first list is one
// batch, and so are the changes that a broken watch missed; otherwise each event is sent alone.
func watchPods(ctx context.Context, client kubernetes.Interface, node string, s *source) {
	selector := fields.OneTermEqualSelector("spec.nodeName", node).String()
	pods := client.CoreV1().Pods(metav1.NamespaceAll)
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (apiruntime.Object, error) {
			options.FieldSelector = selector
			return pods.List(ctx, options)
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			options.FieldSelector = selector
			return pods.Watch(ctx, options)
		},
	}
	push := func(objects []any) {
		var state []*corev1.Pod
		for _, object := range objects {
			// Fake clients don't support field selectors.
			if pod, ok := object.(*corev1.Pod); ok && pod.Spec.NodeName == node {
				state = append(state, pod)
			}
		}
		s.merge(ctx, state)
	}
	store := cache.NewUndeltaStore(push, cache.MetaNamespaceKeyFunc)
	reflector := cache.NewReflectorWithOptions(cache.ToListWatcherWithWatchListSemantics(lw, client), &corev1.Pod{}, store,
		cache.ReflectorOptions{Name: "simkubelet/" + node})
	reflector.RunWithContext(ctx)
}

package clustercache

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/client-go/tools/cache"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Handler receives the changes of the cluster, in the order of the watches. The methods for pods are called on one
// goroutine, those for nodes on another one.
type Handler interface {
	// PodUpdated reports a new or a changed pod. old is nil for a new pod. It has another UID than pod if, while the watch
	// was interrupted, it was deleted and another pod got its name. PodDeleted doesn't report such a deletion.
	PodUpdated(old, pod *PodInfo)
	PodDeleted(pod *PodInfo)
	// NodeUpdated reports a new node, or a node whose cards, or the pods that can run on it, may have changed: its
	// inventory, capacity, allocatable, labels or taints, or whether it is cordoned or ready. Changes of other fields are not
	// reported.
	NodeUpdated(node *corev1.Node)
	NodeDeleted(name string)
	// Synced is called once, after the first lists were handed to the handler.
	Synced()
}

// eventHandlers returns the event handlers that call updated for each new or changed object, which has no old state if it is new, and deleted with
// the last known state of each deleted one.
func eventHandlers[T any](updated func(old, object *T), deleted func(object *T)) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { updated(nil, object.(*T)) },
		UpdateFunc: func(old, object any) { updated(old.(*T), object.(*T)) },
		DeleteFunc: func(object any) {
			if unknown, ok := object.(cache.DeletedFinalStateUnknown); ok { // The watch missed the deletion.
				object = unknown.Obj
			}
			if last, ok := object.(*T); ok {
				deleted(last)
			}
		},
	}
}

// podEvents returns the event handlers that update the pending pods, and then pass changes of pods to the handler.
func (c *Cache) podEvents(h Handler) cache.ResourceEventHandler {
	updated := func(old, pod *PodInfo) {
		if old != nil && old.UID != pod.UID {
			c.pending.remove(old.UID)
		}
		c.pending.update(pod, c.Clock.Now())
		h.PodUpdated(old, pod)
	}
	return eventHandlers(updated, func(pod *PodInfo) {
		c.pending.remove(pod.UID)
		h.PodDeleted(pod)
	})
}

func nodeEvents(h Handler) cache.ResourceEventHandler {
	updated := func(old, node *corev1.Node) {
		if old == nil || relevantChange(old, node) {
			h.NodeUpdated(node)
		}
	}
	return eventHandlers(updated, func(node *corev1.Node) { h.NodeDeleted(node.Name) })
}

// NamespaceHandler receives the changes of namespaces, in the order of the watch.
type NamespaceHandler interface {
	// NamespaceUpdated reports a new or a changed namespace. It has only metadata.
	NamespaceUpdated(namespace *corev1.Namespace)
	NamespaceDeleted(name string)
}

func namespaceEvents(h NamespaceHandler) cache.ResourceEventHandler {
	updated := func(_, namespace *corev1.Namespace) { h.NamespaceUpdated(namespace) }
	return eventHandlers(updated, func(namespace *corev1.Namespace) { h.NamespaceDeleted(namespace.Name) })
}

// relevantChange reports whether an update of a node must be passed to the handler. Most updates needn't.
func relevantChange(old, node *corev1.Node) bool {
	same := func(a, b corev1.ResourceList) bool { return maps.EqualFunc(a, b, resource.Quantity.Equal) }
	closed := func(n *corev1.Node) []reasons.NodeProblem { return eligibility.Closed(n, protocol.Node{}) } // Annotations are compared.
	return !maps.Equal(old.Annotations, node.Annotations) || !maps.Equal(old.Labels, node.Labels) ||
		!same(old.Status.Capacity, node.Status.Capacity) || !same(old.Status.Allocatable, node.Status.Allocatable) ||
		!equality.Semantic.DeepEqual(old.Spec.Taints, node.Spec.Taints) || !slices.Equal(closed(old), closed(node))
}

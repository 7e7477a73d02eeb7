package cluster

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// slim is the informers' transform: it keeps the fields that this package reads and drops the rest, so that a cluster's
// worth of pods stays small in memory. Most pods ask for no GPU, and of those only the identity stays.
func slim(object any) (any, error) {
	switch o := object.(type) {
	case *corev1.Pod:
		return slimPod(o), nil
	case *corev1.Node:
		return slimNode(o), nil
	}
	return object, nil // A DeletedFinalStateUnknown holds what was slimmed before.
}

func slimPod(pod *corev1.Pod) *corev1.Pod {
	out := &corev1.Pod{ObjectMeta: identity(&pod.ObjectMeta)}
	if protocol.PodRequest(pod) == 0 {
		return out
	}
	out.Annotations = only(pod.Annotations, protocol.AnnotationIndex, protocol.AnnotationPod, protocol.AnnotationDevice,
		protocol.AnnotationAssumeTime, protocol.AnnotationAssigned, protocol.AnnotationAllocation)
	out.Spec = corev1.PodSpec{
		NodeName:       pod.Spec.NodeName,
		Priority:       pod.Spec.Priority,
		Containers:     slimContainers(pod.Spec.Containers),
		InitContainers: slimContainers(pod.Spec.InitContainers),
	}
	out.Status.Phase = pod.Status.Phase
	return out
}

// slimContainers keeps every container, since sidecars and init containers count by their place in the list.
func slimContainers(containers []corev1.Container) []corev1.Container {
	out := make([]corev1.Container, len(containers))
	for i := range containers {
		c := &containers[i]
		out[i].RestartPolicy = c.RestartPolicy
		out[i].Resources = corev1.ResourceRequirements{
			Requests: onlyMemory(c.Resources.Requests),
			Limits:   onlyMemory(c.Resources.Limits),
		}
	}
	return out
}

func onlyMemory(list corev1.ResourceList) corev1.ResourceList {
	return only(list, protocol.ResourceMemory)
}

func slimNode(node *corev1.Node) *corev1.Node {
	out := &corev1.Node{ObjectMeta: identity(&node.ObjectMeta)}
	out.Annotations = only(node.Annotations, protocol.AnnotationInventory)
	out.Status.Capacity = only(node.Status.Capacity,
		protocol.ResourceMemory, protocol.ResourceCount, protocol.ResourceWholeCard)
	return out
}

func identity(meta *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: meta.Name, Namespace: meta.Namespace, UID: meta.UID, ResourceVersion: meta.ResourceVersion,
	}
}

// only returns the entries with the given keys, nil where there are none.
func only[M ~map[K]V, K comparable, V any](from M, keys ...K) M {
	var out M
	for _, key := range keys {
		if value, ok := from[key]; ok {
			if out == nil {
				out = M{}
			}
			out[key] = value
		}
	}
	return out
}

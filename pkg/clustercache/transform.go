package clustercache

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// transform is the transform of the informers. It keeps only what the extender reads, so that the objects of a large
// cluster need little memory. An informer may pass it an object that it returned before.
func (s *sharing) transform(object any) (any, error) {
	switch o := object.(type) {
	case *corev1.Pod:
		pod := NewPodInfo(o)
		s.pod(pod)
		return pod, nil
	case *corev1.Node:
		return s.node(o), nil
	case *policyv1.PodDisruptionBudget:
		return trimBudget(o), nil
	case *corev1.Namespace:
		return trimNamespace(o), nil
	case *schedulingv1beta1.PodGroup:
		return &schedulingv1beta1.PodGroup{ObjectMeta: identity(&o.ObjectMeta), Spec: o.Spec}, nil
	}
	return object, nil // A PodInfo, or a DeletedFinalStateUnknown with an object that was transformed before.
}

// node returns a copy of the node with the fields that protocol.ParseNode reads. Of a node that shares its cards, or should, it also
// keeps what decides which pods can use it.
func (s *sharing) node(node *corev1.Node) *corev1.Node {
	out := &corev1.Node{ObjectMeta: identity(&node.ObjectMeta)}
	if inventory, ok := node.Annotations[protocol.AnnotationInventory]; ok {
		out.Annotations = map[string]string{protocol.AnnotationInventory: inventory}
	}
	for name, amount := range node.Status.Capacity {
		if name == protocol.ResourceMemory || name == protocol.ResourceCount || protocol.IsWholeCard(name) {
			if out.Status.Capacity == nil {
				out.Status.Capacity = corev1.ResourceList{}
			}
			out.Status.Capacity[name] = amount
		}
	}
	_, shares := node.Status.Capacity[protocol.ResourceMemory]
	if _, labelled := protocol.SharingLabel(node); !shares && !labelled && protocol.UnreadLabel(node) == "" {
		return out
	}
	out.Status.Allocatable = node.Status.Allocatable // For preemption.
	out.Labels = make(map[string]string, len(node.Labels))
	for key, value := range node.Labels { // Most labels are common to many nodes.
		out.Labels[s.nodeStrings.one(key, key)] = s.nodeStrings.one(value, value)
	}
	out.Spec.Taints, out.Spec.Unschedulable = node.Spec.Taints, node.Spec.Unschedulable
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady { // Its times are dropped, because they change with every heartbeat.
			out.Status.Conditions = []corev1.NodeCondition{{Type: condition.Type, Status: condition.Status}}
		}
	}
	return out
}

func trimBudget(budget *policyv1.PodDisruptionBudget) *policyv1.PodDisruptionBudget {
	out := &policyv1.PodDisruptionBudget{ObjectMeta: identity(&budget.ObjectMeta)}
	if budget.Spec.Selector.Size() <= protocol.MaxSize { // A larger one selects no pod here; the API server still respects it.
		out.Spec.Selector = budget.Spec.Selector
	}
	out.Status.DisruptionsAllowed = budget.Status.DisruptionsAllowed
	out.Status.DisruptedPods = budget.Status.DisruptedPods
	return out
}

func trimNamespace(namespace *corev1.Namespace) *corev1.Namespace {
	out := &corev1.Namespace{ObjectMeta: identity(&namespace.ObjectMeta)}
	out.Labels, out.Annotations = namespace.Labels, map[string]string{}
	for key, value := range namespace.Annotations {
		if strings.HasPrefix(key, protocol.LabelFairShare) {
			out.Annotations[key] = protocol.Shorten(value)
		}
	}
	return out
}

func identity(meta *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: meta.Name, Namespace: meta.Namespace, UID: meta.UID, ResourceVersion: meta.ResourceVersion,
	}
}

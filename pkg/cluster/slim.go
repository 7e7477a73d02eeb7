package cluster

import (
	"fmt"
	"sync"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// slimmer is the transform of the informers. It keeps only the fields that this package reads, so that the pods of a
// large cluster need little memory. Values that many pods have in common are stored once.
type slimmer struct {
	rests  shared[corev1.Pod] // See packed.
	labels shared[map[string]string]
	words  shared[string]
}

func (s *slimmer) slim(object any) (any, error) {
	switch o := object.(type) {
	case *corev1.Pod:
		slim := s.pod(o)
		keepGroup(slim, o)
		return s.pack(slim), nil
	case *corev1.Node:
		return s.node(o), nil
	case *policyv1.PodDisruptionBudget:
		return slimBudget(o), nil
	}
	return object, nil // It was transformed before, or is a DeletedFinalStateUnknown that holds such an object.
}

// pod returns a reduced copy of the pod. Of every pod it keeps the resources that the pod uses of its node, for
// preempt. Of a pod that asks for GPU memory it also keeps all fields that the ledger reads.
func (s *slimmer) pod(pod *corev1.Pod) *corev1.Pod {
	out, memory := &corev1.Pod{ObjectMeta: identity(&pod.ObjectMeta)}, protocol.PodRequest(pod)
	out.DeletionTimestamp = pod.DeletionTimestamp
	out.Spec = corev1.PodSpec{NodeName: pod.Spec.NodeName, Priority: pod.Spec.Priority}
	// The sum replaces the requests of the containers.
	out.Spec.Resources = &corev1.ResourceRequirements{Requests: podRequests(pod, memory)}
	markInterference(&out.Spec, &pod.Spec)
	out.Status.Phase = pod.Status.Phase
	if ports := hostPorts(&pod.Spec); len(ports) > 0 || memory > 0 {
		out.Spec.Containers = []corev1.Container{{Ports: ports}}
	}
	if pod.Spec.NodeName == "" {
		out.Status.NominatedNodeName = pod.Status.NominatedNodeName
	}
	if memory == 0 {
		return out
	}
	out.Spec.Containers[0].Resources.Limits = withMemory(nil, memory)
	// Disruption budgets select by labels. The pointer must be to a copy: a pointer into the pod would keep the whole
	// pod in memory.
	labels := pod.Labels
	out.Labels = *s.labels.one(fmt.Sprint(labels), &labels)
	out.Annotations = only(pod.Annotations, protocol.AnnotationIndex, protocol.AnnotationPod, protocol.AnnotationDevice,
		protocol.AnnotationAssumeTime, protocol.AnnotationAssigned, protocol.AnnotationAllocation, corev1.MirrorPodAnnotationKey)
	if pod.Spec.NodeName == "" {
		keepWaiting(out, pod)
	}
	return out
}

// podRequests returns what a pod that asks for the given GPU memory uses of its node, as kube-scheduler counts it
// (k8s.io/kubernetes pkg/scheduler/framework/types.go, calculateResource).
func podRequests(pod *corev1.Pod, memory gpu.Memory) corev1.ResourceList {
	requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{
		UseStatusResources: true, InPlacePodLevelResourcesVerticalScalingEnabled: true,
	})
	if memory > 0 {
		requests[protocol.ResourceMemory] = *resource.NewQuantity(int64(memory), resource.DecimalSI)
	}
	return requests
}

func (s *slimmer) node(node *corev1.Node) *corev1.Node {
	out := &corev1.Node{ObjectMeta: identity(&node.ObjectMeta)}
	out.Annotations = only(node.Annotations, protocol.AnnotationInventory)
	for name, amount := range node.Status.Capacity {
		if name == protocol.ResourceMemory || name == protocol.ResourceCount || protocol.IsWholeCard(name) {
			if out.Status.Capacity == nil {
				out.Status.Capacity = corev1.ResourceList{}
			}
			out.Status.Capacity[name] = amount
		}
	}
	if _, shares := node.Status.Capacity[protocol.ResourceMemory]; shares {
		out.Status.Allocatable = node.Status.Allocatable // Preempt uses it, and only on such nodes.
		s.keepEntrance(out, node)
	}
	return out
}

// keepEntrance copies to out the fields that decide which pods can use the node. The diagnosis uses them.
func (s *slimmer) keepEntrance(out, node *corev1.Node) {
	out.Labels = make(map[string]string, len(node.Labels))
	for key, value := range node.Labels { // Most labels are common to many nodes.
		out.Labels[*s.words.one(key, &key)] = *s.words.one(value, &value)
	}
	out.Spec.Taints, out.Spec.Unschedulable = node.Spec.Taints, node.Spec.Unschedulable
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady { // Its times are dropped, because they change with every heartbeat.
			out.Status.Conditions = []corev1.NodeCondition{{Type: condition.Type, Status: condition.Status}}
		}
	}
}

func slimBudget(budget *policyv1.PodDisruptionBudget) *policyv1.PodDisruptionBudget {
	out := &policyv1.PodDisruptionBudget{ObjectMeta: identity(&budget.ObjectMeta)}
	out.Spec.Selector = budget.Spec.Selector
	out.Status.DisruptionsAllowed = budget.Status.DisruptionsAllowed
	out.Status.DisruptedPods = budget.Status.DisruptedPods
	return out
}

func identity(meta *metav1.ObjectMeta) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: meta.Name, Namespace: meta.Namespace, UID: meta.UID, ResourceVersion: meta.ResourceVersion,
	}
}

// only returns the entries with the given keys, or nil if there are none.
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

// maxShared limits the values that shared remembers. Most clusters have far fewer kinds of pods.
const maxShared = 4096

// shared stores equal values once. Many pods share what it returns, so it must not be changed. mu guards values.
type shared[T any] struct {
	mu     sync.Mutex
	values map[string]*T
}

// one returns the value that was first passed with the key.
func (s *shared[T]) one(key string, value *T) *T {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known, ok := s.values[key]; ok {
		return known
	}
	if s.values == nil || len(s.values) >= maxShared {
		s.values = map[string]*T{} // The pods keep the values that they have.
	}
	s.values[key] = value
	return value
}

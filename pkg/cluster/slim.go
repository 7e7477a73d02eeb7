package cluster

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// slimmer is the informers' transform: it keeps the fields that this package reads and drops the rest, so that a
// cluster's worth of pods stays small in memory. What many pods have in common is kept once.
type slimmer struct {
	requests shared[corev1.ResourceRequirements]
	labels   shared[map[string]string]
}

func (s *slimmer) slim(object any) (any, error) {
	switch o := object.(type) {
	case *corev1.Pod:
		return s.pod(o), nil
	case *corev1.Node:
		return slimNode(o), nil
	case *policyv1.PodDisruptionBudget:
		return slimBudget(o), nil
	}
	return object, nil // A DeletedFinalStateUnknown holds what was slimmed before.
}

// pod keeps of every pod what it takes of its node, for preempt, and of those that ask for GPU memory all that the
// ledger reads.
func (s *slimmer) pod(pod *corev1.Pod) *corev1.Pod {
	out, memory := &corev1.Pod{ObjectMeta: identity(&pod.ObjectMeta)}, protocol.PodRequest(pod)
	out.DeletionTimestamp = pod.DeletionTimestamp
	out.Spec = corev1.PodSpec{NodeName: pod.Spec.NodeName, Priority: pod.Spec.Priority, Resources: s.sum(podRequests(pod, memory))}
	markInterference(&out.Spec, &pod.Spec)
	out.Status.Phase = pod.Status.Phase
	out.Status.NominatedNodeName = pod.Status.NominatedNodeName
	if memory == 0 {
		if ports := hostPorts(&pod.Spec); len(ports) > 0 {
			out.Spec.Containers = []corev1.Container{{Ports: ports}}
		}
		return out
	}
	// Disruption budgets go by labels. A pointer into the pod would keep all of it in memory.
	labels := pod.Labels
	out.Labels = *s.labels.one(fmt.Sprint(labels), &labels)
	out.Annotations = only(pod.Annotations, protocol.AnnotationIndex, protocol.AnnotationPod, protocol.AnnotationDevice,
		protocol.AnnotationAssumeTime, protocol.AnnotationAssigned, protocol.AnnotationAllocation)
	out.Spec.Containers = slimContainers(pod.Spec.Containers)
	out.Spec.InitContainers = slimContainers(pod.Spec.InitContainers)
	return out
}

// sum takes the place of requests for the pod as a whole: its containers' own are dropped.
func (s *slimmer) sum(requests corev1.ResourceList) *corev1.ResourceRequirements {
	key := make([]byte, 0, 128)
	for _, name := range slices.Sorted(maps.Keys(requests)) {
		quantity := requests[name]
		key = append(append(append(append(key, name...), '='), quantity.String()...), ',')
	}
	return s.requests.one(string(key), &corev1.ResourceRequirements{Requests: requests})
}

// podRequests is what a pod, which asks for so much GPU memory, takes of its node, as kube-scheduler counts
// (pkg/scheduler/framework/types.go, calculateResource).
func podRequests(pod *corev1.Pod, memory gpu.Memory) corev1.ResourceList {
	requests := resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{
		UseStatusResources: true, InPlacePodLevelResourcesVerticalScalingEnabled: true,
	})
	if memory > 0 {
		requests[protocol.ResourceMemory] = *resource.NewQuantity(int64(memory), resource.DecimalSI)
	}
	return requests
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
		for _, port := range c.Ports {
			if port.HostPort > 0 {
				out[i].Ports = append(out[i].Ports, port)
			}
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
	if _, shares := node.Status.Capacity[protocol.ResourceMemory]; shares {
		out.Status.Allocatable = node.Status.Allocatable // For preempt, which happens on such nodes only.
	}
	return out
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

// maxShared bounds what shared remembers: most clusters have far fewer shapes of pods.
const maxShared = 4096

// shared keeps equal values once. What it returns belongs to many pods and must not be changed.
type shared[T any] struct {
	mu     sync.Mutex
	values map[string]*T
}

// one returns the value that was first given under the key.
func (s *shared[T]) one(key string, value *T) *T {
	s.mu.Lock()
	defer s.mu.Unlock()
	if known, ok := s.values[key]; ok {
		return known
	}
	if s.values == nil || len(s.values) >= maxShared {
		s.values = map[string]*T{} // The pods keep what they have.
	}
	s.values[key] = value
	return value
}

package protocol

import (
	"math"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	resourcehelper "k8s.io/component-helpers/resource"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// PodRequest returns the GPU memory that the pod takes from its node, by the rule that kube-scheduler and kubelet
// count with (k8s.io/component-helpers/resource, PodRequests): the sum over app containers and sidecars, or the
// largest step of initialisation where that is more. It is read from the containers' spec alone, which nobody can
// change later; a runtime class's overhead isn't counted, since no container gets it.
func PodRequest(pod *corev1.Pod) gpu.Memory {
	if len(pod.Spec.InitContainers) == 0 { // As with most pods of a cluster, and then there is nothing but the sum.
		var sum gpu.Memory
		for i := range pod.Spec.Containers {
			sum = sum.Add(ContainerRequest(&pod.Spec.Containers[i]))
		}
		return sum
	}
	if !asksGPU(pod) {
		return 0
	}
	bare := corev1.Pod{Spec: corev1.PodSpec{
		Containers:     bareContainers(pod.Spec.Containers),
		InitContainers: bareContainers(pod.Spec.InitContainers),
	}}
	return memoryOf(resourcehelper.PodRequests(&bare, resourcehelper.PodResourcesOptions{}), ResourceMemory)
}

// bareContainers keeps of each container what counts: how it restarts, and its GPU memory as a request. The other
// resources needn't be summed, and a pod that hasn't been through the API server's defaulting may have limits only.
func bareContainers(containers []corev1.Container) []corev1.Container {
	bare := make([]corev1.Container, len(containers))
	for i := range containers {
		bare[i].RestartPolicy = containers[i].RestartPolicy
		if request := ContainerRequest(&containers[i]); request > 0 {
			quantity := resource.NewQuantity(int64(request), resource.DecimalSI)
			bare[i].Resources.Requests = corev1.ResourceList{ResourceMemory: *quantity}
		}
	}
	return bare
}

// Managed reports whether the pod names a resource of which kube-scheduler asks an extender, in any amount: by the rule of
// k8s.io/kubernetes pkg/scheduler/extender.go, IsInterested, for the resources that the extender can be configured with.
// Where a pod has requests of its own, such as the sum that stands for those of its containers, they count too.
func Managed(pod *corev1.Pod) bool {
	if pod.Spec.Resources != nil && names(*pod.Spec.Resources) {
		return true
	}
	for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range containers {
			if names(containers[i].Resources) {
				return true
			}
		}
	}
	return false
}

func names(resources corev1.ResourceRequirements) bool {
	for _, name := range [...]corev1.ResourceName{ResourceMemory, ResourceCount, ResourceWholeCard} {
		_, requested := resources.Requests[name]
		_, limited := resources.Limits[name]
		if requested || limited {
			return true
		}
	}
	return false
}

// ContainerRequest returns the GPU memory that one container asks for.
func ContainerRequest(container *corev1.Container) gpu.Memory {
	// For extended resources requests and limits must be equal, and either implies the other
	// (pkg/apis/core/validation and the API server's defaulting).
	if _, ok := container.Resources.Limits[ResourceMemory]; ok {
		return memoryOf(container.Resources.Limits, ResourceMemory)
	}
	return memoryOf(container.Resources.Requests, ResourceMemory)
}

// memoryOf returns a resource in whole units, zero where it isn't listed. A sum that has passed 64 bits stops there:
// resource.Quantity's own Value would wrap, and a pod that asks for far too much would seem to ask for nothing.
func memoryOf(list corev1.ResourceList, name corev1.ResourceName) gpu.Memory {
	quantity := list[name]
	switch {
	case quantity.Sign() <= 0:
		return 0
	case quantity.CmpInt64(math.MaxInt64) >= 0:
		return math.MaxInt64
	}
	return gpu.NewMemory(quantity.Value())
}

func asksGPU(pod *corev1.Pod) bool {
	for _, containers := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range containers {
			if ContainerRequest(&containers[i]) > 0 {
				return true
			}
		}
	}
	return false
}

// Pod returns what the scheduling of GPU memory needs to know of a pod.
func Pod(pod *corev1.Pod) gpu.Pod {
	out := gpu.Pod{
		UID:       gpu.PodUID(pod.UID),
		Namespace: pod.Namespace,
		Name:      pod.Name,
		Request:   PodRequest(pod),
		Leaving:   pod.DeletionTimestamp != nil,
	}
	if pod.Spec.Priority != nil {
		out.Priority = *pod.Spec.Priority
	}
	return out
}

// Terminal says whether the pod has given its cards back for good. A pod that is merely being deleted has not: its
// containers run through their grace period.
func Terminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

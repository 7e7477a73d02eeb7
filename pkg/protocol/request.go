package protocol

import (
	"math"
	"path"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// PodRequest returns the GPU memory that the pod requests, by the rule of kube-scheduler and kubelet
// (k8s.io/component-helpers/resource, PodRequests): the sum over app containers and sidecars, or the largest step of
// initialization if that is more. It depends on the containers' spec alone, which is immutable. A runtime class's
// overhead isn't counted, since no container gets it.
func PodRequest(pod *corev1.Pod) gpu.Memory { return podTotal(pod, ResourceMemory) }

// PodCores returns the computing that the pod asks for, by the same rule.
func PodCores(pod *corev1.Pod) gpu.Cores { return gpu.NewCores(int64(podTotal(pod, ResourceCores))) }

// podTotal doesn't use that function, which would need a copy of each container: a pod can have thousands.
func podTotal(pod *corev1.Pod, name corev1.ResourceName) gpu.Memory {
	var sidecars, initializing gpu.Memory
	for i := range pod.Spec.InitContainers {
		switch c := &pod.Spec.InitContainers[i]; {
		case isSidecar(c):
			sidecars = sidecars.Add(requestOf(c, name))
		default:
			initializing = max(initializing, sidecars.Add(requestOf(c, name)))
		}
	}
	running := sumOf(pod.Spec.Containers, func(c *corev1.Container) gpu.Memory { return requestOf(c, name) })
	return max(initializing, running.Add(sidecars))
}

// isSidecar reports whether an init container keeps running beside the containers that start after it.
func isSidecar(initial *corev1.Container) bool {
	return initial.RestartPolicy != nil && *initial.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

func sumOf(containers []corev1.Container, request func(*corev1.Container) gpu.Memory) (sum gpu.Memory) {
	for i := range containers {
		sum = sum.Add(request(&containers[i]))
	}
	return sum
}

// podContainers returns how many containers of the pod have a share of its cards at the same time: those with a request among its app
// containers and sidecars, or an init container and the sidecars that started before it, whichever is more; at least one.
func podContainers(pod *corev1.Pod) (n int32) {
	var initializing int32
	for i := range pod.Spec.InitContainers {
		switch c := &pod.Spec.InitContainers[i]; {
		case requestOf(c, ResourceMemory) == 0:
		case isSidecar(c):
			n++
		default:
			initializing = n + 1
		}
	}
	for i := range pod.Spec.Containers {
		if requestOf(&pod.Spec.Containers[i], ResourceMemory) > 0 {
			n++
		}
	}
	return max(n, initializing, 1)
}

// SharedMemory is the directory in which programs expect shared memory.
const SharedMemory = "/dev/shm"

// MountsSharedMemory reports whether the container mounts a volume of its pod as its shared memory. The kubelet takes a path without a slash
// for one below the root (k8s.io/kubernetes pkg/kubelet/kubelet_pods.go, makeMounts).
func MountsSharedMemory(container *corev1.Container) bool {
	return slices.ContainsFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return path.Join("/", m.MountPath) == SharedMemory })
}

// RequestsCards reports whether the pod requests GPU memory, or whole cards (ResourceWholeCard) for an app container.
func RequestsCards(pod *corev1.Pod) bool {
	whole := func(c corev1.Container) bool { return requestOf(&c, ResourceWholeCard) > 0 }
	return PodRequest(pod) > 0 || slices.ContainsFunc(pod.Spec.Containers, whole)
}

// Managed reports whether kube-scheduler can send the pod to the extender: whether the pod names a resource that the
// extender can be configured to manage, in any amount. It follows k8s.io/kubernetes pkg/scheduler/extender.go,
// IsInterested, and also counts pod-level resources.
func Managed(pod *corev1.Pod) bool {
	return pod.Spec.Resources != nil && namesCards(pod.Spec.Resources) ||
		anyContainer(pod, func(c *corev1.Container) bool { return namesCards(&c.Resources) })
}

func namesCards(resources *corev1.ResourceRequirements) bool {
	for _, name := range [...]corev1.ResourceName{ResourceMemory, ResourceCount, ResourceCores, ResourceWholeCard} {
		_, requested := resources.Requests[name]
		_, limited := resources.Limits[name]
		if requested || limited {
			return true
		}
	}
	return false
}

// ContainerRequest returns the GPU memory that one container requests.
func ContainerRequest(container *corev1.Container) gpu.Memory {
	return requestOf(container, ResourceMemory)
}

// ContainerCores returns the computing that one container asks for.
func ContainerCores(container *corev1.Container) gpu.Cores {
	return gpu.NewCores(int64(requestOf(container, ResourceCores)))
}

// requestOf returns the amount of an extended resource that a container requests. Requests and limits must be equal, and the
// API server defaults each to the other (k8s.io/kubernetes pkg/apis/core/validation).
func requestOf(container *corev1.Container, name corev1.ResourceName) gpu.Memory {
	if _, ok := container.Resources.Limits[name]; ok {
		return memoryOf(container.Resources.Limits, name)
	}
	return memoryOf(container.Resources.Requests, name)
}

// memoryOf returns the quantity of a resource in whole units, zero if it is not listed. It saturates at the largest int64:
// resource.Quantity.Value would wrap, and a pod that requests far too much would appear to request nothing.
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

// anyContainer reports whether is returns true for an app container or an init container.
func anyContainer(pod *corev1.Pod, is func(*corev1.Container) bool) bool {
	for _, containers := range [...][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range containers {
			if is(&containers[i]) {
				return true
			}
		}
	}
	return false
}

// Pod returns the fields of a pod that the scheduling of cards depends on. A pod whose labels are invalid counts as one with one
// card and without adapters; no such pod is scheduled (CheckRequest).
func Pod(pod *corev1.Pod) gpu.Pod {
	out := gpu.Pod{
		UID:       gpu.PodUID(pod.UID),
		Namespace: pod.Namespace,
		Name:      pod.Name,
		Request:   PodRequest(pod),
		Cores:     PodCores(pod),
		Leaving:   pod.DeletionTimestamp != nil,
		Lingers:   Lingers(pod),
	}
	if cards, err := PodCards(pod); err == nil && cards > 1 && out.Request > 0 {
		out.Cards = cards
	}
	if n := podContainers(pod); n > 1 {
		out.Containers = n
	}
	out.SharedMemory = anyContainer(pod, func(c *corev1.Container) bool {
		return len(c.VolumeMounts) > 0 && requestOf(c, ResourceMemory) > 0 && MountsSharedMemory(c)
	})
	if out.Request > 0 {
		limits, _ := MemoryLimits(pod) // A pod with an invalid one gets no node (CheckRequest).
		for _, limit := range limits {
			out.Limits = out.Limits.With(limit.Bytes, limit.Request, out.NumCards())
		}
		out.RDMA, _ = PodRDMA(pod)
	}
	if pod.Spec.Priority != nil {
		out.Priority = *pod.Spec.Priority
	}
	return out
}

// Terminal reports whether the pod has ended and holds no memory any more. A pod that is being deleted is not terminal yet:
// its containers run until the end of their grace period.
func Terminal(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

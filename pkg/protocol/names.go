// Package protocol is the wire between the scheduler's half and the node's half: resource names, annotations,
// environment variables and the node's inventory. It is their only reader and writer.
//
// The names are those of the existing gpushare, so that either half can be swapped for its own: they can't be chosen
// anew. What travels is parsed here once, at the edge, into the values of package gpu.
package protocol

import corev1 "k8s.io/api/core/v1"

// The extended resources.
const (
	// ResourceMemory is GPU memory, in the node's unit.
	ResourceMemory corev1.ResourceName = "aliyun.com/gpu-mem"
	// ResourceCount is the number of cards.
	ResourceCount corev1.ResourceName = "aliyun.com/gpu-count"
	// ResourceWholeCard is NVIDIA's own resource. A node that offers it beside ResourceMemory would give cards out twice.
	ResourceWholeCard corev1.ResourceName = "nvidia.com/gpu"
)

// The other resources by which NVIDIA's device plugin gives out cards: see IsWholeCard.
const (
	resourceSharedCard = "nvidia.com/gpu.shared"
	resourceMIGPrefix  = "nvidia.com/mig-"
)

// The pod annotations. All but AnnotationAllocation are environment variables too, see ContainerEnv.
const (
	// AnnotationIndex is the index of the card. Other schedulers of the family write several, separated by commas, which
	// is read from AnnotationAllocation instead.
	AnnotationIndex = "ALIYUN_COM_GPU_MEM_IDX"
	// AnnotationPod is the pod's whole request. It is for people and for the existing plugin: nothing here believes it.
	AnnotationPod = "ALIYUN_COM_GPU_MEM_POD"
	// AnnotationDevice is the card's total.
	AnnotationDevice = "ALIYUN_COM_GPU_MEM_DEV"
	// AnnotationAssumeTime is when the extender chose, in Unix nanoseconds. It is written once.
	AnnotationAssumeTime = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
	// AnnotationAssigned is "false" from bind on and "true" once the node has handed the card to every GPU container.
	AnnotationAssigned = "ALIYUN_COM_GPU_MEM_ASSIGNED"
	// AnnotationAssignTime is when the node did so, in Unix nanoseconds.
	AnnotationAssignTime = "ALIYUN_COM_GPU_MEM_ASSIGN_TIME"
	// AnnotationAllocation is where another scheduler of the family writes the cards of each container.
	AnnotationAllocation = "scheduler.framework.gpushare.allocation"
)

// The environment variables that no annotation is named like.
const (
	// EnvContainer is the request of this one container.
	EnvContainer = "ALIYUN_COM_GPU_MEM_CONTAINER"
	// EnvVisibleDevices tells NVIDIA's container runtime which card to mount.
	EnvVisibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// EnvDisableIsolation switches cGPU's memory isolation off.
	EnvDisableIsolation = "CGPU_DISABLE"
)

// AnnotationGroupWhole is "true" from the bind of a group's last member on, and on those that are bound later: it proves that all members that the group needs had been bound.
const AnnotationGroupWhole = "gpushare.aliyun.com/group-whole"

// The node annotations and labels.
const (
	// AnnotationInventory is the node's Inventory, in JSON.
	AnnotationInventory = "gpushare.aliyun.com/inventory"
	// AnnotationFreed is the time at which GPU memory came free that a refused pod could use. Its value means nothing:
	// changing it makes kube-scheduler look at refused pods again.
	AnnotationFreed = "gpushare.aliyun.com/memory-freed"
	// LabelShared, with the value "true", marks the nodes that share GPU memory.
	LabelShared = "gpushare"
	// LabelDisableIsolation, with the value "true", marks nodes whose containers get EnvDisableIsolation.
	LabelDisableIsolation = "cgpu.disable.isolation"
)

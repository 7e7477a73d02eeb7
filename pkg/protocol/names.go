// Package protocol defines the wire format between extender and device plugin: resource names, annotations, environment
// variables and the node's inventory. Other packages take the names from here.
//
// The names are those of the original gpushare and must not change, so that our extender works with its device plugin and
// the other way round. Values are parsed here once, into the types of package gpu.
package protocol

import corev1 "k8s.io/api/core/v1"

// The extended resources.
const (
	// ResourceMemory is GPU memory, in the node's unit.
	ResourceMemory corev1.ResourceName = "aliyun.com/gpu-mem"
	// ResourceCount is the number of cards.
	ResourceCount corev1.ResourceName = "aliyun.com/gpu-count"
	// ResourceCores is computing, in percent of one card.
	ResourceCores corev1.ResourceName = "aliyun.com/gpu-core.percentage"
	// ResourceWholeCard is NVIDIA's resource for whole cards. A node with ResourceMemory too would allocate its cards twice.
	ResourceWholeCard corev1.ResourceName = "nvidia.com/gpu"
)

// The other resources by which NVIDIA's device plugin allocates cards; see IsWholeCard.
const (
	resourceSharedCard = "nvidia.com/gpu.shared"
	resourceMIGPrefix  = "nvidia.com/mig-"
)

// DRADriver is the name of NVIDIA's DRA driver for cards. It offers them in ResourceSlices, not in the node's capacity.
const DRADriver = "gpu.nvidia.com"

// The pod annotations. AnnotationIndex, AnnotationPod and AnnotationDevice name environment variables too; see ContainerEnv.
const (
	// AnnotationIndex is the index of the card, or the indexes of several, separated by commas: then AnnotationAllocation has
	// the pod's share of each.
	AnnotationIndex = "ALIYUN_COM_GPU_MEM_IDX"
	// AnnotationPod is the pod's total request, for display and for the original plugin. gpushare itself never trusts it.
	AnnotationPod = "ALIYUN_COM_GPU_MEM_POD"
	// AnnotationDevice is the card's total memory, or that of each card in the order of AnnotationIndex.
	AnnotationDevice = "ALIYUN_COM_GPU_MEM_DEV"
	// AnnotationAssumeTime is when the card was chosen, in Unix nanoseconds: by the extender, or by the device plugin for a pod that was bound
	// without the extender (ChosenByNode). It is written once.
	AnnotationAssumeTime = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
	// AnnotationAssigned is "false" from bind on, and "true" once the node has allocated the card to every GPU container.
	AnnotationAssigned = "ALIYUN_COM_GPU_MEM_ASSIGNED"
	// AnnotationAssignTime is when AnnotationAssigned became "true", in Unix nanoseconds.
	AnnotationAssignTime = "ALIYUN_COM_GPU_MEM_ASSIGN_TIME"
	// AnnotationAllocation is the memory of each container on each card, in JSON: {"container": {"card": memory}}. A container's key
	// is its position in the spec. It is written for pods with several cards only; related schedulers write it for all.
	AnnotationAllocation = "scheduler.framework.gpushare.allocation"
)

// The environment variables that have no annotation of the same name.
const (
	// EnvContainer is the container's request, divided by its number of cards: the share of AnnotationDevice.
	EnvContainer = "ALIYUN_COM_GPU_MEM_CONTAINER"
	// EnvCores is the computing that the container asks for, in percent of each of its cards; not set for one that asks for none.
	EnvCores = "ALIYUN_COM_GPU_CORE_CONTAINER"
	// EnvMemoryLimit is how much of each of its cards the container may use, in MiB; set only for one with a limit above its request.
	EnvMemoryLimit = "GPUSHARE_MEMORY_LIMIT_MIB"
	// EnvRDMAPorts tells NCCL which ports of RDMA adapters to use. NCCL takes a name for the beginning of names, but a container can open
	// only the devices of its own adapters (NCCL documentation, Environment Variables, NCCL_IB_HCA). If the pod sets it too, the kubelet passes
	// the pod's value (k8s.io/kubernetes pkg/kubelet/kubelet_pods.go, GenerateRunContainerOptions).
	EnvRDMAPorts = "NCCL_IB_HCA"
	// EnvVisibleDevices names the cards that NVIDIA's container runtime mounts, separated by commas.
	EnvVisibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// EnvDeviceOrder is in which order CUDA numbers a container's cards. It is set for several cards: by its default CUDA puts the fastest first,
	// and the other variables list cards by index, the order of the bus.
	EnvDeviceOrder = "CUDA_DEVICE_ORDER"
	// EnvDisableIsolation turns off cGPU's memory isolation.
	EnvDisableIsolation = "CGPU_DISABLE"
)

// LabelCount is the number of cards over which a pod's GPU memory is divided. It counts until the pod is bound; then the pod's
// annotations do.
const LabelCount = "aliyun.com/gpu-count"

// LabelRDMA asks for cards near an RDMA adapter, which the containers with GPU memory get: RDMAPreferred or RDMARequired.
const (
	LabelRDMA     = "gpushare.aliyun.com/rdma"
	RDMAPreferred = "preferred"
	RDMARequired  = "required"
)

// AnnotationGroupRun names the run of its gang in which a member was bound: the UID of one of the run's members. Members that
// were bound together have the same value, and later members get it too while the run is running.
const AnnotationGroupRun = "gpushare.aliyun.com/group-run"

// GateFairShare is the scheduling gate of a pod that waits for its share.
const GateFairShare = "gpushare.aliyun.com/fair-share"

// The annotations and labels of namespaces.
const (
	// AnnotationFairShareWeight is the weight of the namespace's tenant, AnnotationFairShareGuaranteed its guaranteed amount
	// in units (package fairshare).
	AnnotationFairShareWeight     = "gpushare.aliyun.com/fair-share-weight"
	AnnotationFairShareGuaranteed = "gpushare.aliyun.com/fair-share-guaranteed"
	// LabelFairShare, with the value FairShareOff, marks namespaces that are exempt from fair sharing.
	LabelFairShare = "gpushare.aliyun.com/fair-share"
	FairShareOff   = "off"
)

// AnnotationGroupWhole is "true" on the member that was bound last of those that its gang needs, and on members that are
// bound later, and "false" on the earlier ones. So if a bound member has "true", the gang was bound completely.
const AnnotationGroupWhole = "gpushare.aliyun.com/group-whole"

// AnnotationIsolation is on a pod whose containers were given a limit: the isolation mode, and after a colon which limit is not
// in force (PodIsolation). The device plugin writes it when it has read the limits back.
const AnnotationIsolation = "gpushare.aliyun.com/isolation"

// AnnotationOveruse is on a pod of which a container uses more GPU memory than it requests (Overuse). The device plugin writes it.
const AnnotationOveruse = "gpushare.aliyun.com/overuse"

// AnnotationLostCards is on a pod that was given cards that its node doesn't have any more: their UUIDs, separated by commas. The device
// plugin writes it.
const AnnotationLostCards = "gpushare.aliyun.com/lost-cards"

// The node annotations and labels.
const (
	// AnnotationInventory is the node's Inventory, in JSON.
	AnnotationInventory = "gpushare.aliyun.com/inventory"
	// AnnotationFreed is the time at which GPU memory became free that a rejected pod could use. Only its change matters: it
	// makes kube-scheduler retry rejected pods.
	AnnotationFreed = "gpushare.aliyun.com/memory-freed"
	// LabelShared marks the nodes that share GPU memory. Its value is "true", or the name of the release that has the node's device
	// plugin.
	LabelShared = "gpushare"
	// LabelPool names the pool of the node, for display only. PoolOf also knows the labels of cloud providers.
	LabelPool = "gpushare.aliyun.com/pool"
	// LabelConfig names the configuration of the node's device plugin (package nodeconfig).
	LabelConfig = "gpushare.aliyun.com/config"
	// LabelIsolation is the isolation mode of the node. It takes precedence over the device plugin's flag.
	LabelIsolation = "gpushare.aliyun.com/isolation"
	// LabelDisableIsolation, with the value "true", marks the nodes whose containers get EnvDisableIsolation.
	LabelDisableIsolation = "cgpu.disable.isolation"
)

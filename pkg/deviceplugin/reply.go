package deviceplugin

import (
	"fmt"
	"strconv"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// reply words what containers are told.
type reply struct {
	unit      gpu.Unit
	visibleBy VisibleDevices
	strategy  DeviceListStrategy
	// position is the index that the driver, and so NVIDIA's runtime, has for a card now. Ours stays when it counts anew.
	position func(card int) int
	// disableIsolation tells whether the node's containers run without cGPU's isolation.
	disableIsolation func() bool
}

// Given tells a container its card. The environment and the CDI device are made from one name: they can't disagree,
// and the kubelet's checkpoint keeps them together.
func (r *reply) Given(card gpu.Card, pod, container gpu.Memory) *pluginapi.ContainerAllocateResponse {
	name := r.visibleBy.name(card, r.position(card.Index))
	response := &pluginapi.ContainerAllocateResponse{Envs: protocol.ContainerEnv{
		Card: card, VisibleAs: name,
		PodRequest: pod, ContainerRequest: container,
		DisableIsolation: r.disableIsolation(),
	}.Variables()}
	if r.strategy == ListByCDI {
		response.CdiDevices = []*pluginapi.CDIDevice{{Name: cdiKind + "=" + name}}
	}
	return response
}

// Refused is what the existing plugin answers in place of an error: a container that starts with the name of a card
// that there isn't (AliyunContainerService/gpushare-device-plugin pkg/gpu/nvidia/allocate.go). The kubelet's checkpoint
// keeps it, so noIndex is what such containers are known by after a restart.
func (r *reply) Refused(cards []gpu.Card, pod, container gpu.Memory) *pluginapi.ContainerAllocateResponse {
	var total gpu.Memory
	if len(cards) > 0 {
		total = cards[0].Memory
	}
	return &pluginapi.ContainerAllocateResponse{Envs: map[string]string{
		protocol.EnvVisibleDevices: fmt.Sprintf("no-gpu-has-%s%s-to-run", container, r.unit),
		protocol.AnnotationIndex:   noIndex,
		protocol.AnnotationPod:     pod.String(),
		protocol.EnvContainer:      container.String(),
		protocol.AnnotationDevice:  total.String(),
	}}
}

// noIndex is the card index of a container that was told that there is no card for it.
const noIndex = "-1"

// VisibleDevices is by which name NVIDIA's runtime is told the card.
type VisibleDevices string

// The names that it knows.
const (
	VisibleByUUID  VisibleDevices = "uuid"
	VisibleByIndex VisibleDevices = "index"
)

// name returns the name of a card that the driver has at this position. A card without UUID has no other.
func (v VisibleDevices) name(card gpu.Card, position int) string {
	if v == VisibleByUUID && card.UUID != "" {
		return card.UUID
	}
	return strconv.Itoa(position)
}

// DeviceListStrategy is by which way the card gets into the container. The names are those of NVIDIA's own device
// plugin.
type DeviceListStrategy string

// The ways.
const (
	// ListByEnv leaves it to NVIDIA's container runtime, which reads the environment.
	ListByEnv DeviceListStrategy = "envvar"
	// ListByCDI names a CDI device besides, which the container runtime itself puts into the container.
	ListByCDI DeviceListStrategy = "cdi-cri"
)

// cdiKind is the kind in the specifications that NVIDIA's container toolkit generates (nvidia-ctk cdi generate), whose
// devices are named by UUID and by index.
const cdiKind = "nvidia.com/gpu"

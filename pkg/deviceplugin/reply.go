package deviceplugin

import (
	"fmt"
	"strconv"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// reply builds the responses to Allocate.
type reply struct {
	unit      gpu.Unit
	visibleBy VisibleDevices
	strategy  DeviceListStrategy
	// position returns the index that the driver, and so NVIDIA's runtime, uses for a card now. The card's own index
	// stays the same when the driver renumbers the cards.
	position func(card int) int
	// disableIsolation reports whether the node's containers run without cGPU's isolation.
	disableIsolation func() bool
}

// Given returns the response that gives a container its card. The environment and the CDI device are made from one name,
// so they can't disagree. The kubelet's checkpoint keeps them together.
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

// Refused returns what the existing plugin answers in place of an error: the container starts with the name of a card
// that doesn't exist (AliyunContainerService/gpushare-device-plugin pkg/gpu/nvidia/allocate.go). The kubelet's checkpoint
// keeps the response, so noIndex identifies such containers after a restart.
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

// noIndex is the card index in the response to a container that gets no card.
const noIndex = "-1"

// VisibleDevices is the kind of name by which NVIDIA's runtime finds the card.
type VisibleDevices string

// The kinds of names that NVIDIA's runtime accepts.
const (
	VisibleByUUID  VisibleDevices = "uuid"
	VisibleByIndex VisibleDevices = "index"
)

// name returns the name of a card at this position in the driver's list. A card without a UUID is always named by its
// position.
func (v VisibleDevices) name(card gpu.Card, position int) string {
	if v == VisibleByUUID && card.UUID != "" {
		return card.UUID
	}
	return strconv.Itoa(position)
}

// DeviceListStrategy is the way in which a card gets into the container. The values are those of NVIDIA's own device
// plugin.
type DeviceListStrategy string

// The supported strategies.
const (
	// ListByEnv leaves it to NVIDIA's container runtime, which reads the environment.
	ListByEnv DeviceListStrategy = "envvar"
	// ListByCDI also names a CDI device, which the container runtime itself adds to the container.
	ListByCDI DeviceListStrategy = "cdi-cri"
)

// cdiKind is the device kind in the specifications that NVIDIA's container toolkit generates (nvidia-ctk cdi generate).
// They name the devices by UUID and by index.
const cdiKind = "nvidia.com/gpu"

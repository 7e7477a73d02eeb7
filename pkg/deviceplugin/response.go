package deviceplugin

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	events "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// responses builds the responses to Allocate and reports the decisions.
type responses struct {
	cards     *cardState
	visibleBy VisibleDevices
	strategy  DeviceListStrategy
	// disableIsolation reports whether the node's containers run without cGPU's isolation.
	disableIsolation func() bool
	// errorEnv lets a container start without a card, as the existing plugin does, where the allocation is rejected otherwise.
	errorEnv bool
	events   events.EventRecorder
	// node is the object for an Event if no pod was matched.
	node *corev1.ObjectReference
}

// respond returns the response to the kubelet. request is the container's.
func (r *responses) respond(d allocation.Decision, request gpu.Memory, l containerLimit) (*pluginapi.ContainerAllocateResponse, error) {
	switch {
	case d.Rejection == nil:
		return r.withCards(d, l), nil
	case !r.errorEnv:
		return nil, status.Error(codeOf(d), d.Rejection.Text)
	case d.Pod == nil:
		return r.withoutCard(request, request), nil
	}
	return r.withoutCard(d.Pod.Request, request), nil
}

func codeOf(d allocation.Decision) codes.Code {
	switch {
	case d.Rejection.NoRoom:
		return codes.ResourceExhausted
	case d.Result == allocation.RefusedUnavailable:
		return codes.Unavailable
	}
	return codes.FailedPrecondition
}

// report logs the decision and sends the Event that it needs.
func (r *responses) report(ctx context.Context, d allocation.Decision, request gpu.Memory) {
	logger := klog.FromContext(ctx).WithValues("memory", request, "match", d.Match, "result", d.Result)
	object, prefix := r.node, ""
	if d.Pod != nil {
		logger = logger.WithValues("pod", klog.KRef(d.Pod.Namespace, d.Pod.Name), "container", d.Container.Name)
		object, prefix = podReference(d.Pod), fmt.Sprintf("container %s: ", d.Container.Name)
	}
	if d.Rejection != nil {
		logger.Info("Rejected an allocation", "reason", d.Rejection.Text, "startsWithoutCard", r.errorEnv)
		text := prefix + d.Rejection.Text
		if r.errorEnv {
			text += "; it starts all the same, without a card"
		}
		r.events.Event(object, corev1.EventTypeWarning, eventRefused, text)
		return
	}
	logger.Info("Allocated cards", "cards", d.Indexes())
	if d.Moved != "" {
		r.events.Eventf(object, corev1.EventTypeWarning, eventMoved, "container %s got %s: %s",
			d.Container.Name, allocation.Give(d.Container, d.Cards).Cards, d.Moved)
	}
	if d.NoAdapter != "" {
		logger.Info("Gave no RDMA adapter", "reason", d.NoAdapter)
		r.events.Eventf(object, corev1.EventTypeWarning, eventNoAdapter, "container %s gets no RDMA adapter: %s", d.Container.Name, d.NoAdapter)
	}
}

// withCards returns the response that gives a container its cards. The environment and the CDI devices are made from the same names,
// so they can't disagree. The kubelet's checkpoint keeps them together.
func (r *responses) withCards(d allocation.Decision, l containerLimit) *pluginapi.ContainerAllocateResponse {
	cards, container := d.Cards, d.Container
	names := make([]string, len(cards))
	for i, card := range cards {
		names[i] = r.visibleBy.name(card, r.cards.Get().Position(card.Index))
	}
	response := &pluginapi.ContainerAllocateResponse{Envs: protocol.ContainerEnv{
		Cards: cards, VisibleAs: names,
		PodRequest: d.Pod.Request, ContainerRequest: container.Request, ContainerCores: container.Cores,
		DisableIsolation: r.disableIsolation(), Allowed: l.allowed, RDMAPorts: d.Adapters.Ports,
	}.Variables()}
	maps.Copy(response.Envs, l.Env)
	for _, mount := range l.Mounts {
		response.Mounts = append(response.Mounts, &pluginapi.Mount{HostPath: mount.HostPath, ContainerPath: mount.ContainerPath})
	}
	if len(d.Adapters.Devices) > 0 {
		for _, device := range append(slices.Clip(d.Adapters.Devices), connectionManager) {
			path := rdmaDevices + device
			response.Devices = append(response.Devices, &pluginapi.DeviceSpec{ContainerPath: path, HostPath: path, Permissions: "rw"})
		}
	}
	devices := l.Devices
	if len(devices) == 0 && r.strategy == ListByCDI {
		for _, name := range names {
			devices = append(devices, isolation.CardKind+"="+name)
		}
	}
	for _, device := range devices {
		response.CdiDevices = append(response.CdiDevices, &pluginapi.CDIDevice{Name: device})
	}
	return response
}

// rdmaDevices is the directory with the devices of RDMA adapters, and connectionManager is one that all of them need for connections by IP address.
const (
	rdmaDevices       = "/dev/infiniband/"
	connectionManager = "rdma_cm"
)

// withoutCard returns what the existing plugin answers in place of an error: the container starts with the name of a card that
// doesn't exist (AliyunContainerService/gpushare-device-plugin pkg/gpu/nvidia/allocate.go). The kubelet's checkpoint keeps the
// response, so the index identifies such containers after a restart.
func (r *responses) withoutCard(pod, container gpu.Memory) *pluginapi.ContainerAllocateResponse {
	var total gpu.Memory
	if cards := r.cards.Get().Cards; len(cards) > 0 {
		total = cards[0].Memory
	}
	return &pluginapi.ContainerAllocateResponse{Envs: protocol.ContainerEnv{
		Cards:      []gpu.Card{{Index: allocation.NoCard, Memory: total}},
		VisibleAs:  []string{fmt.Sprintf("no-gpu-has-%s%s-to-run", container, r.cards.Get().Unit)},
		PodRequest: pod, ContainerRequest: container,
	}.Variables()}
}

// VisibleDevices is the kind of name by which NVIDIA's runtime finds the card.
type VisibleDevices string

// The kinds of names that NVIDIA's runtime accepts.
const (
	VisibleByUUID  VisibleDevices = "uuid"
	VisibleByIndex VisibleDevices = "index"
)

// name returns the name of a card at this position in the driver's list, which is the name of a card without a UUID.
func (v VisibleDevices) name(card gpu.Card, position int) string {
	if v == VisibleByUUID && card.UUID != "" {
		return card.UUID
	}
	return strconv.Itoa(position)
}

// DeviceListStrategy is how a card gets into the container. The values are those of NVIDIA's own device plugin.
type DeviceListStrategy string

// The supported strategies.
const (
	// ListByEnv leaves it to NVIDIA's container runtime, which reads the environment.
	ListByEnv DeviceListStrategy = "envvar"
	// ListByCDI also names a CDI device, which the container runtime itself adds to the container.
	ListByCDI DeviceListStrategy = "cdi-cri"
)

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	devicesv1 "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// predecessor has both halves of Alibaba's gpushare, as they behave on the wire.
type predecessor struct {
	scene *scene
	node  machine
	// serving is the device plugin.
	serving *oldPlugin
}

// assume binds a pod like Alibaba's extender: first it writes the annotations, then a Binding without any.
func (p *predecessor) assume(name string, card int) {
	s := p.scene
	s.Helper()
	pod := s.Get(name)
	memory := framework.GPUMemOf(pod)
	s.Annotate(name, map[string]string{
		protocol.AnnotationIndex:      strconv.Itoa(card),
		protocol.AnnotationPod:        strconv.FormatInt(memory, 10),
		protocol.AnnotationDevice:     strconv.Itoa(cardMiB),
		protocol.AnnotationAssigned:   "false",
		protocol.AnnotationAssumeTime: strconv.FormatInt(time.Now().UnixNano(), 10),
	})
	must(s, s.Pods().Bind(s.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ID, Name: name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: p.node.Name},
	}, metav1.CreateOptions{}))
}

// oldPlugin is Alibaba's device plugin, as the kubelet sees it.
type oldPlugin struct {
	devicesv1.UnimplementedDevicePluginServer
	cluster *framework.Cluster
	node    *framework.Node
	// each is the memory of every card: the plugin assumes that all are as large as the first.
	each int64

	server *grpc.Server
	done   chan struct{}
	mu     sync.Mutex
}

// startOldPlugin serves the node's cards until the test ends, and returns when the node has them.
func startOldPlugin(s *scene, node machine) *oldPlugin {
	s.Helper()
	o := &oldPlugin{cluster: s.Cluster, node: node.Node, each: int64(node.Cards[0].MiB), server: grpc.NewServer(), done: make(chan struct{})}
	devicesv1.RegisterDevicePluginServer(o.server, o)
	dir := node.Kubelet.DevicePluginDir()
	socket := filepath.Join(dir, "aliyungpushare.sock")
	listener, err := net.Listen("unix", socket)
	must(s, err)
	var serving sync.WaitGroup
	serving.Go(func() { _ = o.server.Serve(listener) })
	s.Cleanup(func() {
		o.stop()
		serving.Wait()
		_ = os.Remove(socket)
	})

	kubelet, err := grpc.NewClient("unix://"+filepath.Join(dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(s, err)
	defer kubelet.Close()
	_, err = devicesv1.NewRegistrationClient(kubelet).Register(s.Context(), &devicesv1.RegisterRequest{
		Version: devicesv1.Version, Endpoint: filepath.Base(socket), ResourceName: string(protocol.ResourceMemory),
	}, grpc.WaitForReady(true))
	must(s, err)
	count := strconv.Itoa(len(node.Cards))
	patch, err := json.Marshal(map[string]any{"status": map[string]any{
		"capacity":    map[string]string{string(protocol.ResourceCount): count},
		"allocatable": map[string]string{string(protocol.ResourceCount): count},
	}})
	must(s, err)
	_, err = s.Cluster.Client.CoreV1().Nodes().Patch(s.Context(), node.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	must(s, err)
	s.waitAllocatable(node, o.each*int64(len(node.Cards)))
	return o
}

// stop ends the plugin, like the deletion of its DaemonSet.
func (o *oldPlugin) stop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	select {
	case <-o.done:
	default:
		close(o.done)
		o.server.Stop()
	}
}

// GetDevicePluginOptions implements the kubelet's protocol.
func (o *oldPlugin) GetDevicePluginOptions(context.Context, *devicesv1.Empty) (*devicesv1.DevicePluginOptions, error) {
	return &devicesv1.DevicePluginOptions{}, nil
}

// ListAndWatch implements the kubelet's protocol, with one device for each unit and the card's UUID in its ID.
func (o *oldPlugin) ListAndWatch(_ *devicesv1.Empty, stream devicesv1.DevicePlugin_ListAndWatchServer) error {
	list := &devicesv1.ListAndWatchResponse{}
	for _, card := range o.node.Cards {
		for unit := range o.each {
			list.Devices = append(list.Devices, &devicesv1.Device{ID: fmt.Sprintf("%s-_-%d", card.UUID, unit), Health: devicesv1.Healthy})
		}
	}
	if err := stream.Send(list); err != nil {
		return err
	}
	select {
	case <-stream.Context().Done():
	case <-o.done:
	}
	return nil
}

// Allocate implements the kubelet's protocol. Of the assumed pods of this size that aren't assigned, it takes the one with
// the earliest assume time, and rewrites that time.
func (o *oldPlugin) Allocate(ctx context.Context, request *devicesv1.AllocateRequest) (*devicesv1.AllocateResponse, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	var asked int64
	for _, container := range request.ContainerRequests {
		asked += int64(len(container.DevicesIds))
	}
	pods, err := o.cluster.Client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + o.node.Name + ",status.phase=Pending"})
	if err != nil {
		return nil, err
	}
	assumed := slices.DeleteFunc(pods.Items, func(pod corev1.Pod) bool {
		return framework.GPUMemOf(&pod) != asked || pod.Annotations[protocol.AnnotationAssigned] != "false"
	})
	if len(assumed) == 0 {
		return nil, fmt.Errorf("no assumed pod asks for %d", asked)
	}
	pod := slices.MinFunc(assumed, func(a, b corev1.Pod) int { return int(assumeTime(&a) - assumeTime(&b)) })
	index, err := strconv.Atoi(pod.Annotations[protocol.AnnotationIndex])
	if err != nil {
		return nil, err
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{
		protocol.AnnotationAssigned:   "true",
		protocol.AnnotationAssumeTime: strconv.FormatInt(time.Now().UnixNano(), 10),
	}}})
	if err != nil {
		return nil, err
	}
	if _, err := o.cluster.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return nil, err
	}
	answer := &devicesv1.AllocateResponse{}
	for _, container := range request.ContainerRequests {
		answer.ContainerResponses = append(answer.ContainerResponses, &devicesv1.ContainerAllocateResponse{Envs: map[string]string{
			protocol.EnvVisibleDevices: o.node.Cards[index].UUID,
			protocol.AnnotationIndex:   strconv.Itoa(index),
			protocol.AnnotationPod:     strconv.FormatInt(asked, 10),
			protocol.EnvContainer:      strconv.Itoa(len(container.DevicesIds)),
			protocol.AnnotationDevice:  strconv.FormatInt(o.each, 10),
		}})
	}
	return answer, nil
}

func assumeTime(pod *corev1.Pod) int64 {
	nanoseconds, _ := strconv.ParseInt(pod.Annotations[protocol.AnnotationAssumeTime], 10, 64)
	return nanoseconds
}

package simkubelet

import (
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// The kubelet's limit on PodResources queries (apis/podresources/constants.go).
const (
	podResourcesQPS   = 100
	podResourcesBurst = 10
)

// podResources serves the PodResources API (apis/podresources/server_v1.go). A pod is visible from the moment that its
// admission begins until it has ended or was rejected.
type podResources struct {
	podresourcesapi.UnimplementedPodResourcesListerServer
	process *process
	server  *grpc.Server
	wg      sync.WaitGroup
}

func servePodResources(ctx context.Context, p *process) (*podResources, error) {
	listener, err := listen(p.options.podResourcesSocket())
	if err != nil {
		return nil, err
	}
	limiter := rate.NewLimiter(podResourcesQPS, podResourcesBurst)
	s := &podResources{process: p}
	s.server = grpc.NewServer(grpc.WaitForHandlers(true), grpc.UnaryInterceptor(
		func(ctx context.Context, request any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
			event := Event{Call: Call("PodResources/" + info.FullMethod[len(podResourcesPrefix):]), Start: time.Now()}
			if get, ok := request.(*podresourcesapi.GetPodResourcesRequest); ok {
				event.Namespace, event.Name = get.PodNamespace, get.PodName
			}
			var response any
			err := status.Error(codes.ResourceExhausted, "rejected by rate limit")
			if limiter.Allow() {
				response, err = handler(ctx, request)
			}
			event.End, event.Err = time.Now(), err
			p.options.Trace(event)
			return response, err
		}))
	podresourcesapi.RegisterPodResourcesListerServer(s.server, s)
	s.wg.Go(func() {
		if err := s.server.Serve(listener); err != nil {
			klog.FromContext(ctx).Error(err, "PodResources server ended")
		}
	})
	return s, nil
}

const podResourcesPrefix = "/v1.PodResourcesLister/"

func (s *podResources) stop() {
	s.server.Stop()
	s.wg.Wait()
}

// Get answers for one pod. The error for a pod that can't be seen carries no code but Unknown.
func (s *podResources) Get(_ context.Context, request *podresourcesapi.GetPodResourcesRequest) (*podresourcesapi.GetPodResourcesResponse, error) {
	pod, ok := s.process.pods.named(types.NamespacedName{Namespace: request.PodNamespace, Name: request.PodName})
	if !ok || s.process.inactive(pod) && !s.process.options.ShowRejected {
		return nil, fmt.Errorf("pod %s in namespace %s not found", request.PodName, request.PodNamespace)
	}
	return &podresourcesapi.GetPodResourcesResponse{PodResources: s.of(pod)}, nil
}

// List answers for all active pods, and takes those that have ended off the books.
func (s *podResources) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	response := &podresourcesapi.ListPodResourcesResponse{}
	active := s.process.activePods()
	s.process.devices.collect()
	for _, pod := range active {
		response.PodResources = append(response.PodResources, s.of(pod))
	}
	return response, nil
}

// GetAllocatableResources answers with all healthy devices.
func (s *podResources) GetAllocatableResources(context.Context, *podresourcesapi.AllocatableResourcesRequest) (*podresourcesapi.AllocatableResourcesResponse, error) {
	response := &podresourcesapi.AllocatableResourcesResponse{}
	for resource, devices := range s.process.devices.allocatable() {
		for _, device := range devices {
			var nodes []int64
			for _, node := range device.GetTopology().GetNodes() {
				nodes = append(nodes, node.ID)
			}
			response.Devices = append(response.Devices, containerDevices(resource, device, nodes)...)
		}
	}
	return response, nil
}

// of leaves ordinary init containers out.
func (s *podResources) of(pod *corev1.Pod) *podresourcesapi.PodResources {
	out := &podresourcesapi.PodResources{Name: pod.Name, Namespace: pod.Namespace}
	for i := range pod.Spec.InitContainers {
		if container := &pod.Spec.InitContainers[i]; restartable(container) {
			out.Containers = append(out.Containers, s.container(pod, container))
		}
	}
	for i := range pod.Spec.Containers {
		out.Containers = append(out.Containers, s.container(pod, &pod.Spec.Containers[i]))
	}
	return out
}

func (s *podResources) container(pod *corev1.Pod, container *corev1.Container) *podresourcesapi.ContainerResources {
	out := &podresourcesapi.ContainerResources{Name: container.Name}
	for resource, h := range s.process.devices.books.holdings(pod.UID, container.Name) {
		for numa, ids := range h.devices {
			for _, id := range ids {
				var nodes []int64
				if numa != noNUMA {
					nodes = []int64{numa}
				}
				out.Devices = append(out.Devices, containerDevices(resource, &pluginapi.Device{ID: id}, nodes)...)
			}
		}
	}
	return out
}

// containerDevices gives each device an entry of its own, one for each of its NUMA nodes.
func containerDevices(resource string, device *pluginapi.Device, nodes []int64) []*podresourcesapi.ContainerDevices {
	if len(nodes) == 0 {
		return []*podresourcesapi.ContainerDevices{{ResourceName: resource, DeviceIds: []string{device.ID}}}
	}
	var out []*podresourcesapi.ContainerDevices
	for _, node := range nodes {
		out = append(out, &podresourcesapi.ContainerDevices{
			ResourceName: resource, DeviceIds: []string{device.ID},
			Topology: &podresourcesapi.TopologyInfo{Nodes: []*podresourcesapi.NUMANode{{ID: node}}},
		})
	}
	return out
}

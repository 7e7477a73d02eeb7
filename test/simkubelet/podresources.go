package simkubelet

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// The kubelet's rate limit for PodResources requests (apis/podresources/constants.go).
const (
	podResourcesQPS   = 100
	podResourcesBurst = 10
)

// podResources serves Get of the PodResources API (apis/podresources/server_v1.go). A pod is visible from the start of
// its admission until it has ended or is rejected.
type podResources struct {
	podresourcesapi.UnimplementedPodResourcesListerServer
	process *process
	limiter *rate.Limiter
	server  *grpc.Server
	wg      sync.WaitGroup
}

func servePodResources(ctx context.Context, p *process) (*podResources, error) {
	listener, err := listen(p.options.podResourcesSocket())
	if err != nil {
		return nil, err
	}
	s := &podResources{
		process: p, limiter: rate.NewLimiter(podResourcesQPS, podResourcesBurst), server: grpc.NewServer(grpc.WaitForHandlers(true)),
	}
	podresourcesapi.RegisterPodResourcesListerServer(s.server, s)
	s.wg.Go(func() {
		if err := s.server.Serve(listener); err != nil {
			klog.FromContext(ctx).Error(err, "PodResources server ended")
		}
	})
	return s, nil
}

func (s *podResources) stop() {
	s.server.Stop()
	s.wg.Wait()
}

// Get returns one pod. The error for a pod that isn't visible has the code Unknown.
func (s *podResources) Get(_ context.Context, request *podresourcesapi.GetPodResourcesRequest) (response *podresourcesapi.GetPodResourcesResponse, err error) {
	err = traced(s.process.options.Trace, Event{Call: CallPodResourcesGet}, func(*Event) error {
		if !s.limiter.Allow() {
			return status.Error(codes.ResourceExhausted, "rejected by rate limit")
		}
		pods := s.process.pods.list()
		at := slices.IndexFunc(pods, func(pod *corev1.Pod) bool {
			return pod.Namespace == request.PodNamespace && pod.Name == request.PodName
		})
		if at < 0 || s.process.inactive(pods[at]) && !s.process.options.ShowRejected {
			return fmt.Errorf("pod %s in namespace %s not found", request.PodName, request.PodNamespace)
		}
		response = &podresourcesapi.GetPodResourcesResponse{PodResources: s.of(pods[at])}
		return nil
	})
	return response, err
}

// of returns the pod's entry. Ordinary init containers are omitted.
func (s *podResources) of(pod *corev1.Pod) *podresourcesapi.PodResources {
	out := &podresourcesapi.PodResources{Name: pod.Name, Namespace: pod.Namespace}
	initContainers := slices.DeleteFunc(slices.Clone(pod.Spec.InitContainers), func(c corev1.Container) bool { return !restartable(&c) })
	for _, container := range append(initContainers, pod.Spec.Containers...) {
		resources := &podresourcesapi.ContainerResources{Name: container.Name}
		for name, a := range s.process.devices.allocated(pod.UID, container.Name) {
			for id := range a.ids {
				resources.Devices = append(resources.Devices, &podresourcesapi.ContainerDevices{ResourceName: name, DeviceIds: []string{id}})
			}
		}
		out.Containers = append(out.Containers, resources)
	}
	return out
}

package nodee2e

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	recordedResource = "gpushare.test/recorded"
	recorderSocket   = "recorder.sock"
)

// recorder is a device plugin that records the kubelet's calls, and what the kubelet's PodResources shows of pods at each
// call. It doesn't record the names of devices, because they are random. Instead it records the number of the allocation
// that had the devices before.
type recorder struct {
	pluginapi.UnimplementedDevicePluginServer
	dir, podResources string

	mu     sync.Mutex
	server *grpc.Server
	lists  chan []*pluginapi.Device
	lines  []string
	// refuse is the error that the next Allocate returns.
	refuse error
	// watched holds the pods whose visibility is recorded at each Allocate, as "namespace/name".
	watched     []string
	allocations []sets.Set[string]
	preferred   sets.Set[string]
}

func (r *recorder) say(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
}

// refuseNext makes the next Allocate return an error.
func (r *recorder) refuseNext(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = err
}

// register serves the plugin and registers it as soon as a kubelet runs.
func (r *recorder) register(t testing.TB, devices []*pluginapi.Device) {
	t.Helper()
	r.stop()
	var last error
	err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, patience, true, func(ctx context.Context) (bool, error) {
		last = r.tryRegister(ctx, devices)
		return last == nil, nil
	})
	if err != nil {
		t.Fatalf("registering with the kubelet in %s: %v", r.dir, errors.Join(err, last))
	}
}

func (r *recorder) tryRegister(ctx context.Context, devices []*pluginapi.Device) error {
	// A starting kubelet first clears the folder and then listens.
	kubelet := filepath.Join(r.dir, "kubelet.sock")
	there, err := net.Dial("unix", kubelet)
	if err != nil {
		return err
	}
	defer there.Close()
	socket := filepath.Join(r.dir, recorderSocket)
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server, lists := grpc.NewServer(), make(chan []*pluginapi.Device, 8)
	lists <- devices
	r.mu.Lock()
	r.server, r.lists = server, lists
	r.mu.Unlock()
	pluginapi.RegisterDevicePluginServer(server, r)
	go func() { _ = server.Serve(listener) }() // It ends with stop.
	connection, err := grpc.NewClient("unix:"+kubelet, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	_, err = pluginapi.NewRegistrationClient(connection).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: recorderSocket, ResourceName: recordedResource,
		Options: &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	})
	if err != nil {
		r.stop()
	}
	return err
}

func (r *recorder) stop() {
	r.mu.Lock()
	server := r.server
	r.server = nil
	r.mu.Unlock()
	if server != nil {
		server.Stop()
	}
}

func (r *recorder) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

func (r *recorder) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	r.mu.Lock()
	lists := r.lists
	r.mu.Unlock()
	for {
		select {
		case devices := <-lists:
			if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

// GetPreferredAllocation returns the devices that must be included, and then the last available ones.
func (r *recorder) GetPreferredAllocation(_ context.Context, request *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	asked := request.ContainerRequests[0]
	must := sets.New(asked.MustIncludeDeviceIDs...)
	ids := slices.Clone(asked.MustIncludeDeviceIDs)
	for _, id := range slices.Backward(slices.Sorted(slices.Values(asked.AvailableDeviceIDs))) {
		if len(ids) < int(asked.AllocationSize) && !must.Has(id) {
			ids = append(ids, id)
		}
	}
	r.say("  GetPreferredAllocation: %d of %d available, among them %s", asked.AllocationSize, len(asked.AvailableDeviceIDs), r.origin(must))
	r.mu.Lock()
	defer r.mu.Unlock()
	r.preferred = sets.New(ids...)
	return &pluginapi.PreferredAllocationResponse{
		ContainerResponses: []*pluginapi.ContainerPreferredAllocationResponse{{DeviceIDs: ids}},
	}, nil
}

func (r *recorder) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	ids := sets.New(request.ContainerRequests[0].DevicesIds...)
	origin := r.origin(ids)
	r.mu.Lock()
	asPreferred, refuse := r.preferred.Equal(ids), r.refuse
	watched := slices.Clone(r.watched)
	r.preferred, r.refuse = nil, nil
	r.allocations = append(r.allocations, ids)
	number := len(r.allocations)
	r.mu.Unlock()
	r.say("  Allocate #%d: %d devices (%s), as preferred: %t; %d containers asked for at once", number, len(ids), origin, asPreferred, len(request.ContainerRequests))
	for _, pod := range watched {
		r.say("    %s: %s", pod, r.visible(ctx, pod))
	}
	if refuse != nil {
		return nil, refuse
	}
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{
		{Envs: map[string]string{"RECORDED": fmt.Sprint(number)}},
	}}, nil
}

// origin returns, as text, how many of the devices each earlier allocation had last.
func (r *recorder) origin(ids sets.Set[string]) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts := map[int]int{}
	for id := range ids {
		last := 0
		for i, before := range r.allocations {
			if before.Has(id) {
				last = i + 1
			}
		}
		counts[last]++
	}
	var out []string
	for _, allocation := range slices.Sorted(maps.Keys(counts)) {
		from := "unused"
		if allocation > 0 {
			from = fmt.Sprintf("of #%d", allocation)
		}
		out = append(out, fmt.Sprintf("%d %s", counts[allocation], from))
	}
	if len(out) == 0 {
		return "none"
	}
	return strings.Join(out, ", ")
}

// visible returns what PodResources shows of a pod. It retries if the kubelet limits the rate of calls.
func (r *recorder) visible(ctx context.Context, pod string) string {
	namespace, name, _ := strings.Cut(pod, "/")
	for {
		answer, err := r.get(ctx, namespace, name)
		if status.Code(err) == codes.ResourceExhausted {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		if err != nil {
			return fmt.Sprintf("%s: %s", status.Code(err), status.Convert(err).Message())
		}
		var out []string
		for _, container := range answer.PodResources.Containers {
			devices := 0
			for _, d := range container.Devices {
				if d.ResourceName == recordedResource {
					devices += len(d.DeviceIds)
				}
			}
			out = append(out, fmt.Sprintf("%s has %d", container.Name, devices))
		}
		return strings.Join(out, ", ")
	}
}

func (r *recorder) get(ctx context.Context, namespace, name string) (*podresourcesv1.GetPodResourcesResponse, error) {
	connection, err := grpc.NewClient("unix:"+r.podResources, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	return podresourcesv1.NewPodResourcesListerClient(connection).
		Get(ctx, &podresourcesv1.GetPodResourcesRequest{PodNamespace: namespace, PodName: name})
}

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
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/test/framework"
)

const (
	recordedResource = "gpushare.test/recorded"
	// devices is the number of the recorder's devices.
	devices = 20
)

// makeDevices returns the devices, with the given number of unhealthy ones.
func makeDevices(unhealthy int) []*pluginapi.Device {
	out := make([]*pluginapi.Device, devices)
	for i := range out {
		out[i] = &pluginapi.Device{ID: fmt.Sprintf("%02d", i), Health: pluginapi.Healthy}
		if i < unhealthy {
			out[i].Health = pluginapi.Unhealthy
		}
	}
	return out
}

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
	// reject is the error that the next Allocate returns.
	reject error
	// watched holds the pods whose visibility is recorded at each Allocate, as "namespace/name".
	watched     []string
	allocations []sets.Set[string]
	preferred   sets.Set[string]
}

func (r *recorder) log(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, fmt.Sprintf(format, args...))
}

// rejectNext makes the next Allocate return an error.
func (r *recorder) rejectNext(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.reject = err
}

// watch makes the recorder record the visibility of a pod.
func (r *recorder) watch(pod string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watched = append(r.watched, pod)
}

func (r *recorder) unwatch(pod string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watched = slices.DeleteFunc(r.watched, func(watched string) bool { return watched == pod })
}

// register serves the plugin and registers it as soon as a kubelet runs.
func (r *recorder) register(t testing.TB, devices []*pluginapi.Device) {
	t.Helper()
	r.stop()
	framework.Eventually(t, "the recorder is registered with the kubelet in "+r.dir, func(ctx context.Context) error {
		return r.tryRegister(ctx, "recorder.sock", devices)
	})
}

func (r *recorder) tryRegister(ctx context.Context, name string, devices []*pluginapi.Device) error {
	// A starting kubelet first clears the folder and then listens.
	kubelet := filepath.Join(r.dir, "kubelet.sock")
	ready, err := net.Dial("unix", kubelet)
	if err != nil {
		return err
	}
	defer ready.Close()
	socket := filepath.Join(r.dir, name)
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
		Version: pluginapi.Version, Endpoint: name, ResourceName: recordedResource,
		Options: &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true},
	})
	if err != nil {
		r.stop()
	}
	return err
}

func (r *recorder) stop() {
	if server := r.detach(); server != nil {
		server.Stop()
	}
}

// detach returns the server, which another registration then doesn't stop; nil if there is none.
func (r *recorder) detach() *grpc.Server {
	r.mu.Lock()
	defer r.mu.Unlock()
	server := r.server
	r.server = nil
	return server
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
	wanted := request.ContainerRequests[0]
	must := sets.New(wanted.MustIncludeDeviceIDs...)
	ids := slices.Clone(wanted.MustIncludeDeviceIDs)
	for _, id := range slices.Backward(slices.Sorted(slices.Values(wanted.AvailableDeviceIDs))) {
		if len(ids) < int(wanted.AllocationSize) && !must.Has(id) {
			ids = append(ids, id)
		}
	}
	r.log("  GetPreferredAllocation: %d of %d available, among them %s", wanted.AllocationSize, len(wanted.AvailableDeviceIDs), r.origin(must))
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
	asPreferred, reject := r.preferred.Equal(ids), r.reject
	watched := slices.Clone(r.watched)
	r.preferred, r.reject = nil, nil
	r.allocations = append(r.allocations, ids)
	number := len(r.allocations)
	r.mu.Unlock()
	r.log("  Allocate #%d: %d devices (%s), as preferred: %t; %d containers in the request", number, len(ids), origin, asPreferred, len(request.ContainerRequests))
	for _, pod := range watched {
		r.log("    %s: %s", pod, r.visible(ctx, pod))
	}
	if reject != nil {
		return nil, reject
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

package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// kubelet is the part of a kubelet that the plugin's tests need: registration, the device list, allocation container by
// container, the checkpoint, and PodResources if a test wants it.
type kubelet struct {
	pluginapi.UnimplementedRegistrationServer
	podresourcesv1.UnimplementedPodResourcesListerServer
	t   testing.TB
	dir string
	// server serves registrations, and resources serves PodResources.
	server, resources *grpc.Server
	asked             *rate.Limiter
	mu                sync.Mutex
	registrations     int
	// unreached counts the plugins that registered and couldn't be dialed back. The real kubelet keeps trying for ten seconds.
	unreached  int
	connection *grpc.ClientConn
	health     map[string]string
	entries    []entry
	admitted   map[string]*corev1.Pod
	rejected   int
	answered   int
	// refuses is the error with which registrations are answered.
	refuses error
	// endpoints are the sockets that were registered. Each is refused from then on, as by a kubelet 1.37 whose record of
	// connected plugins is stale.
	endpoints sets.Set[string]
	// showsRejected makes Get show rejected pods, as kubelets 1.34 and 1.35 do.
	showsRejected bool
	// between, if set, is called between GetPreferredAllocation and Allocate.
	between func()
}

// newKubelet returns a kubelet that doesn't serve yet.
func newKubelet(t testing.TB, dir string, entries ...entry) *kubelet {
	return &kubelet{
		t: t, dir: dir, asked: rate.NewLimiter(100, 10), resources: grpc.NewServer(),
		// A server that stops waits for connections on which no request has come yet.
		server:  grpc.NewServer(grpc.ConnectionTimeout(100 * time.Millisecond)),
		entries: entries, admitted: map[string]*corev1.Pod{}, endpoints: sets.New[string](),
	}
}

// startKubelet starts a kubelet in the directory, with the entries of its predecessor's checkpoint.
func startKubelet(t testing.TB, dir string, entries ...entry) *kubelet {
	t.Helper()
	sockets, err := filepath.Glob(filepath.Join(dir, "*.sock"))
	check.Must(t, err)
	for _, socket := range sockets {
		if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
	}
	k := newKubelet(t, dir, entries...)
	pluginapi.RegisterRegistrationServer(k.server, k)
	listener, err := net.Listen("unix", filepath.Join(dir, kubeletSocketName))
	check.Must(t, err)
	go func() { _ = k.server.Serve(listener) }()
	t.Cleanup(k.stop)
	return k
}

// podResources serves PodResources at the socket.
func (k *kubelet) podResources(socket string) {
	listener, err := net.Listen("unix", socket)
	check.Must(k.t, err)
	podresourcesv1.RegisterPodResourcesListerServer(k.resources, k)
	go func() { _ = k.resources.Serve(listener) }()
	k.t.Cleanup(k.resources.Stop)
}

func (k *kubelet) stop() {
	k.server.Stop()
	k.resources.Stop()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.connection != nil {
		_ = k.connection.Close()
	}
}

// loseCheckpoint stops the kubelet and starts one that has lost its checkpoint but has admitted these pods.
func (k *kubelet) loseCheckpoint(b *fixture, admitted ...*corev1.Pod) *kubelet {
	k.t.Helper()
	healthy, all := k.devices()
	k.stop()
	check.Must(k.t, os.Remove(filepath.Join(k.dir, checkpointFile)))
	next := startKubelet(k.t, k.dir)
	for _, pod := range admitted {
		next.admitted[pod.Namespace+"/"+pod.Name] = pod
	}
	if b.socket != "" {
		next.podResources(b.socket)
	}
	next.awaitDevices(healthy, all)
	return next
}

func (k *kubelet) Register(_ context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if r.Version != "v1beta1" || r.ResourceName != "aliyun.com/gpu-mem" || r.Endpoint != filepath.Base(r.Endpoint) {
		return nil, status.Errorf(codes.InvalidArgument, "bad registration %v", r)
	}
	k.mu.Lock()
	refuses := k.refuses
	if k.endpoints.Has(r.Endpoint) {
		refuses = fmt.Errorf("device plugin already connected: %s", r.Endpoint)
	}
	k.endpoints.Insert(r.Endpoint)
	k.mu.Unlock()
	if refuses != nil {
		return nil, refuses
	}
	connection, err := grpc.NewClient("unix://"+filepath.Join(k.dir, r.Endpoint),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	// The real kubelet also dials back before it answers.
	client := pluginapi.NewDevicePluginClient(connection)
	if _, err := client.GetDevicePluginOptions(context.Background(), &pluginapi.Empty{}); err != nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.unreached++
		return nil, err
	}
	stream, err := client.ListAndWatch(context.Background(), &pluginapi.Empty{})
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.registrations++
	if k.connection != nil {
		_ = k.connection.Close()
	}
	k.connection, k.health = connection, nil
	go k.listen(stream)
	return &pluginapi.Empty{}, nil
}

func (k *kubelet) listen(stream grpc.ServerStreamingClient[pluginapi.ListAndWatchResponse]) {
	for {
		message, err := stream.Recv()
		if err != nil {
			return
		}
		k.mu.Lock()
		k.health = map[string]string{}
		for _, d := range message.Devices {
			k.health[d.ID] = d.Health
		}
		k.mu.Unlock()
	}
}

// devices returns the number of healthy devices and of all devices.
func (k *kubelet) devices() (healthy, all int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, health := range k.health {
		if health == pluginapi.Healthy {
			healthy++
		}
	}
	return healthy, len(k.health)
}

// awaitRegistrations waits until there were n registrations in total.
func (k *kubelet) awaitRegistrations(n int) {
	k.t.Helper()
	await.True(k.t, fmt.Sprintf("%d registrations", n), func() bool {
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.registrations == n
	})
}

// awaitDevices waits until the kubelet has this number of healthy devices and of all devices.
func (k *kubelet) awaitDevices(healthy, all int) {
	k.t.Helper()
	await.True(k.t, fmt.Sprintf("%d of %d devices", healthy, all), func() bool {
		h, a := k.devices()
		return h == healthy && a == all
	})
}

// admit allocates for the pod's containers one by one: for all, or for those named.
func (k *kubelet) admit(pod *corev1.Pod, containers ...string) (map[string]map[string]string, error) {
	k.mu.Lock()
	k.admitted[pod.Namespace+"/"+pod.Name] = pod
	k.mu.Unlock()
	env := map[string]map[string]string{}
	// The devices of ordinary init containers are reused by the containers after them.
	var reusable []string
	for i, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		request := int(protocol.ContainerRequest(&c))
		if request == 0 || len(containers) > 0 && !slices.Contains(containers, c.Name) {
			continue
		}
		ids, response, err := k.allocate(podUID(pod), c.Name, request, reusable)
		if err != nil {
			k.reject(pod)
			return env, err
		}
		env[c.Name] = response
		if i < len(pod.Spec.InitContainers) && c.RestartPolicy == nil {
			reusable = append(reusable, ids...)
		} else {
			reusable = slices.DeleteFunc(reusable, func(id string) bool { return slices.Contains(ids, id) })
		}
	}
	return env, nil
}

// mustAdmit admits a pod and fails the test if it is rejected.
func (k *kubelet) mustAdmit(pod *corev1.Pod, containers ...string) map[string]map[string]string {
	k.t.Helper()
	env, err := k.admit(pod, containers...)
	if err != nil {
		k.t.Fatalf("pod %s: %v", pod.Name, err)
	}
	return env
}

// podUID returns the UID by which the kubelet knows the pod. For a static pod it isn't the mirror pod's UID.
func podUID(pod *corev1.Pod) string {
	return cmp.Or(pod.Annotations[corev1.MirrorPodAnnotationKey], string(pod.UID))
}

// reject rejects a pod. The API server doesn't know of it yet.
func (k *kubelet) reject(pod *corev1.Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.admitted[pod.Namespace+"/"+pod.Name] = pod
	if !k.showsRejected {
		delete(k.admitted, pod.Namespace+"/"+pod.Name)
	}
}

func (k *kubelet) allocate(uid, container string, request int, reusable []string) (ids []string, env map[string]string, err error) {
	k.mu.Lock()
	taken := map[string]bool{}
	for _, e := range k.entries {
		for _, ids := range e.DeviceIDs {
			for _, id := range ids {
				taken[id] = true
			}
		}
	}
	var available []string
	for id, health := range k.health {
		if health == pluginapi.Healthy && !taken[id] {
			available = append(available, id)
		}
	}
	client := pluginapi.NewDevicePluginClient(k.connection)
	k.mu.Unlock()
	ctx := context.Background()
	ids = slices.Clone(reusable[:min(request, len(reusable))])
	if len(ids) < request {
		available = append(available, ids...)
		if len(available) < request {
			return nil, nil, fmt.Errorf("%d devices left, %d wanted", len(available), request)
		}
		preferred, err := client.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{
				{AvailableDeviceIDs: available, MustIncludeDeviceIDs: ids, AllocationSize: int32(request)},
			},
		})
		if err != nil {
			return nil, nil, fmt.Errorf("GetPreferredAllocation: %w", err)
		}
		for _, id := range slices.Concat(preferred.ContainerResponses[0].DeviceIDs, available) {
			if len(ids) < request && !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
	}
	if k.between != nil {
		k.between()
	}
	response, err := client.Allocate(ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if err != nil {
		return nil, nil, fmt.Errorf("Allocate: %w", err)
	}
	answer := response.ContainerResponses[0]
	data, err := proto.Marshal(answer)
	if err != nil {
		return nil, nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.entries = append(k.entries, entry{uid, container, "aliyun.com/gpu-mem", map[int64][]string{-1: ids}, data})
	writeCheckpoint(k.t, k.dir, k.entries...)
	return ids, answer.Envs, nil
}

// removePod removes a pod from the device allocations, as the kubelet does at the allocation after the pod's end. The checkpoint
// file is written when that allocation has succeeded.
func (k *kubelet) removePod(pod *corev1.Pod) {
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.admitted, pod.Namespace+"/"+pod.Name)
	k.entries = slices.DeleteFunc(k.entries, func(e entry) bool { return e.PodUID == podUID(pod) })
}

// Get answers as PodResources does, including its rate limit.
func (k *kubelet) Get(_ context.Context, r *podresourcesv1.GetPodResourcesRequest) (*podresourcesv1.GetPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.asked.AllowN(time.Now(), 1) {
		k.rejected++
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	k.answered++
	pod, ok := k.admitted[r.PodNamespace+"/"+r.PodName]
	if !ok {
		return nil, fmt.Errorf("pod %s in namespace %s not found", r.PodName, r.PodNamespace)
	}
	out := &podresourcesv1.PodResources{Name: pod.Name, Namespace: pod.Namespace}
	add := func(name string) {
		container := &podresourcesv1.ContainerResources{Name: name}
		for _, e := range k.entries {
			if e.PodUID == podUID(pod) && e.ContainerName == name {
				container.Devices = append(container.Devices,
					&podresourcesv1.ContainerDevices{ResourceName: e.ResourceName, DeviceIds: e.DeviceIDs[-1]})
			}
		}
		out.Containers = append(out.Containers, container)
	}
	for _, c := range pod.Spec.InitContainers {
		if c.RestartPolicy != nil {
			add(c.Name)
		}
	}
	for _, c := range pod.Spec.Containers {
		add(c.Name)
	}
	return &podresourcesv1.GetPodResourcesResponse{PodResources: out}, nil
}

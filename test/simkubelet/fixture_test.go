package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"
)

const (
	nodeName     = "node-1"
	resourceName = "example.com/memory"
	patience     = 20 * time.Second
)

// fixture is a node with a fake API and a trace of the calls.
type fixture struct {
	t       *testing.T
	ctx     context.Context
	api     *fake.Clientset
	kubelet *Kubelet

	mu     sync.Mutex
	events []Event
}

func newFixture(t *testing.T, change ...func(*Options)) *fixture {
	t.Helper()
	// Not t.TempDir: its paths contain the test's name and are too long for a socket.
	root, err := os.MkdirTemp("", "sk")
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{t: t, ctx: t.Context(), api: fake.NewClientset()}
	options := Options{
		NodeName: nodeName, Client: f.api, Root: root, Labels: map[string]string{"gpushare": "true"},
		BackOff: 10 * time.Millisecond, NodeSyncDelay: time.Millisecond, StatusInterval: 50 * time.Millisecond,
		Trace: func(e Event) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.events = append(f.events, e)
		},
	}
	for _, c := range change {
		c(&options)
	}
	if f.kubelet, err = New(options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.kubelet.Stop()
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	return f
}

// start starts the kubelet and waits until it watches pods, because a fake API doesn't deliver earlier changes.
func (f *fixture) start() {
	f.t.Helper()
	if err := f.kubelet.Start(f.ctx); err != nil {
		f.t.Fatal(err)
	}
	f.watching()
}

func (f *fixture) restart(what RestartOptions) {
	f.t.Helper()
	f.api.ClearActions()
	if err := f.kubelet.Restart(f.ctx, what); err != nil {
		f.t.Fatal(err)
	}
	f.watching()
}

func (f *fixture) watching() {
	f.t.Helper()
	f.await("the kubelet watches pods", func() bool {
		for _, action := range f.api.Actions() {
			if action.Matches("watch", "pods") {
				return true
			}
		}
		return false
	})
}

func (f *fixture) await(what string, condition func() bool) {
	f.t.Helper()
	for deadline := time.Now().Add(patience); !condition(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			f.t.Fatalf("timed out waiting: %s\ntrace: %v", what, f.calls())
		}
	}
}

// awaitListed waits for a ListAndWatch message with this number of devices since the last clear.
func (f *fixture) awaitListed(devices int) {
	f.t.Helper()
	f.await("the kubelet has the plugin's devices", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return slices.ContainsFunc(f.events, func(e Event) bool { return e.Call == CallListAndWatch && e.Available == devices })
	})
}

// calls returns the allocation calls to the plugin in order, as "call pod/container".
func (f *fixture) calls() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for _, e := range f.events {
		if e.Call == CallAllocate || e.Call == CallGetPreferredAllocation {
			out = append(out, fmt.Sprintf("%s %s/%s", e.Call, e.Name, e.Container))
		}
	}
	return out
}

// allocated returns the device IDs of the container's Allocate call.
func (f *fixture) allocated(pod, container string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, e := range f.events {
		if e.Call == CallAllocate && e.Name == pod && e.Container == container {
			return slices.Sorted(slices.Values(e.Devices))
		}
	}
	return nil
}

func (f *fixture) clear() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = nil
}

func (f *fixture) create(pods ...*corev1.Pod) {
	f.t.Helper()
	for _, pod := range pods {
		if _, err := f.api.CoreV1().Pods(pod.Namespace).Create(f.ctx, pod, metav1.CreateOptions{}); err != nil {
			f.t.Fatal(err)
		}
	}
}

func (f *fixture) pod(name string) *corev1.Pod {
	pod, err := f.api.CoreV1().Pods("default").Get(f.ctx, name, metav1.GetOptions{})
	if err != nil {
		return &corev1.Pod{}
	}
	return pod
}

// del sets the pod's deletion timestamp, as the API server does for pods on a node.
func (f *fixture) del(name string, grace int64) {
	f.t.Helper()
	pod := f.pod(name).DeepCopy()
	pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = new(metav1.Now()), &grace
	if _, err := f.api.CoreV1().Pods("default").Update(f.ctx, pod, metav1.UpdateOptions{}); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fixture) awaitPhase(name string, phase corev1.PodPhase) {
	f.t.Helper()
	f.await(fmt.Sprintf("pod %s is %s", name, phase), func() bool { return f.pod(name).Status.Phase == phase })
}

func (f *fixture) awaitNode(name corev1.ResourceName, capacity, allocatable int64) {
	f.t.Helper()
	f.await(fmt.Sprintf("node has %s %d/%d", name, allocatable, capacity), func() bool {
		node, err := f.api.CoreV1().Nodes().Get(f.ctx, nodeName, metav1.GetOptions{})
		if err != nil {
			return false
		}
		c, ok := node.Status.Capacity[name]
		a := node.Status.Allocatable[name]
		return ok && c.Value() == capacity && a.Value() == allocatable
	})
}

func (f *fixture) podResources() podresourcesapi.PodResourcesListerClient {
	f.t.Helper()
	conn, err := grpc.NewClient("unix://"+f.kubelet.PodResourcesSocket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { _ = conn.Close() })
	return podresourcesapi.NewPodResourcesListerClient(conn)
}

// visible returns the pod's device IDs in PodResources by container, or the error.
func visible(ctx context.Context, client podresourcesapi.PodResourcesListerClient, name string) (map[string][]string, error) {
	response, err := client.Get(ctx, &podresourcesapi.GetPodResourcesRequest{PodNamespace: "default", PodName: name})
	if err != nil {
		return nil, err
	}
	out := map[string][]string{}
	for _, container := range response.PodResources.Containers {
		out[container.Name] = nil
		for _, devices := range container.Devices {
			out[container.Name] = append(out[container.Name], devices.DeviceIds...)
		}
		slices.Sort(out[container.Name])
	}
	return out, nil
}

// newPod returns a pod that is bound to the node.
func newPod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name), Annotations: map[string]string{}},
		Spec:       corev1.PodSpec{NodeName: nodeName},
		Status:     corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, c := range change {
		c(pod)
	}
	return pod
}

func container(name string, devices int64) corev1.Container {
	list := corev1.ResourceList{resourceName: *resource.NewQuantity(devices, resource.DecimalSI)}
	return corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Limits: list, Requests: list}}
}

func app(name string, devices int64) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Spec.Containers = append(pod.Spec.Containers, container(name, devices)) }
}

func initContainer(name string, devices int64) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, container(name, devices))
	}
}

func sidecar(name string, devices int64) func(*corev1.Pod) {
	return func(pod *corev1.Pod) {
		c := container(name, devices)
		c.RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways)
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, c)
	}
}

func annotated(key, value string) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.Annotations[key] = value }
}

func createdAt(seconds int64) func(*corev1.Pod) {
	return func(pod *corev1.Pod) { pod.CreationTimestamp = metav1.Unix(1_700_000_000+seconds, 0) }
}

// plugin is a device plugin on a Unix socket. Its answers put the device IDs into the environment.
type plugin struct {
	pluginapi.UnimplementedDevicePluginServer
	options  *pluginapi.DevicePluginOptions
	allocate func(context.Context, []string) error
	prefer   func(*pluginapi.ContainerPreferredAllocationRequest) []string

	server *grpc.Server
	lists  chan []*pluginapi.Device
}

func healthy(n int) []*pluginapi.Device {
	devices := make([]*pluginapi.Device, n)
	for i := range devices {
		devices[i] = &pluginapi.Device{ID: fmt.Sprintf("d%02d", i), Health: pluginapi.Healthy}
	}
	return devices
}

// plug serves a plugin with these devices and registers it.
func (f *fixture) plug(p *plugin, devices []*pluginapi.Device) *plugin {
	f.t.Helper()
	socket := filepath.Join(f.kubelet.DevicePluginDir(), "p.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		f.t.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		f.t.Fatal(err)
	}
	p.server, p.lists = grpc.NewServer(), make(chan []*pluginapi.Device, 10)
	p.lists <- devices
	pluginapi.RegisterDevicePluginServer(p.server, p)
	served := make(chan error, 1)
	go func() { served <- p.server.Serve(listener) }()
	f.t.Cleanup(func() {
		p.server.Stop()
		if err := <-served; err != nil {
			f.t.Error(err)
		}
	})

	conn, err := grpc.NewClient("unix://"+filepath.Join(f.kubelet.DevicePluginDir(), "kubelet.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		f.t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	_, err = pluginapi.NewRegistrationClient(conn).Register(f.ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: "p.sock", ResourceName: resourceName,
	})
	if err != nil {
		f.t.Fatal(err)
	}
	return p
}

func (p *plugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	if p.options == nil {
		return &pluginapi.DevicePluginOptions{}, nil
	}
	return p.options, nil
}

func (p *plugin) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	for {
		select {
		case devices := <-p.lists:
			if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: devices}); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (p *plugin) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	ids := request.ContainerRequests[0].DevicesIds
	if p.allocate != nil {
		if err := p.allocate(ctx, ids); err != nil {
			return nil, err
		}
	}
	return &pluginapi.AllocateResponse{ContainerResponses: []*pluginapi.ContainerAllocateResponse{
		{Envs: map[string]string{"DEVICES": fmt.Sprint(slices.Sorted(slices.Values(ids)))}},
	}}, nil
}

func (p *plugin) GetPreferredAllocation(_ context.Context, request *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	return &pluginapi.PreferredAllocationResponse{ContainerResponses: []*pluginapi.ContainerPreferredAllocationResponse{
		{DeviceIDs: p.prefer(request.ContainerRequests[0])},
	}}, nil
}

// running returns the environments of the running containers by "pod/container".
func (f *fixture) running() map[string]map[string]string {
	out := map[string]map[string]string{}
	for _, c := range f.kubelet.Containers() {
		if c.Running {
			out[c.Name+"/"+c.Container] = maps.Clone(c.Env)
		}
	}
	return out
}

func resourceQuantity(value int64) resource.Quantity {
	return *resource.NewQuantity(value, resource.DecimalSI)
}

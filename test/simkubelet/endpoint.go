package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	// dialTimeout is the time for connecting to a plugin's socket during its Register call (plugin/v1beta1/client.go).
	dialTimeout = 10 * time.Second
	// preStartTimeout is the only deadline that the kubelet sets for a call to a plugin.
	preStartTimeout = pluginapi.KubeletPreStartContainerRPCTimeoutInSecs * time.Second
)

// endpoint is one registration of a plugin.
type endpoint struct {
	resource string
	options  *pluginapi.DevicePluginOptions
	api      pluginapi.DevicePluginClient
	trace    func(Event)

	mu      sync.Mutex
	stopped time.Time // Zero while the plugin is connected.
}

// stoppedEndpoint returns the endpoint of a resource in the checkpoint until its plugin registers.
func stoppedEndpoint(resource string) *endpoint {
	return &endpoint{resource: resource, stopped: time.Now()}
}

func (e *endpoint) stop(at time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stopped = at
}

// stoppedFor returns the time since the plugin stopped, or 0 if it is connected.
func (e *endpoint) stoppedFor(now time.Time) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stopped.IsZero() {
		return 0
	}
	return now.Sub(e.stopped)
}

func (e *endpoint) usable() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.stopped.IsZero() {
		return fmt.Errorf("endpoint %s has been stopped", e.resource)
	}
	return nil
}

func (e *endpoint) allocate(ctx context.Context, pod *corev1.Pod, container string, ids []string) (*pluginapi.AllocateResponse, error) {
	if err := e.usable(); err != nil {
		return nil, err
	}
	event := e.event(CallAllocate, pod, container)
	event.Devices = ids
	response, err := e.api.Allocate(ctx, &pluginapi.AllocateRequest{
		ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
	})
	if len(response.GetContainerResponses()) > 0 {
		event.Env = response.ContainerResponses[0].Envs
	}
	e.done(event, err)
	return response, err
}

func (e *endpoint) preferred(ctx context.Context, pod *corev1.Pod, container string, available, mustInclude []string, size int) (*pluginapi.PreferredAllocationResponse, error) {
	if err := e.usable(); err != nil {
		return nil, err
	}
	event := e.event(CallGetPreferredAllocation, pod, container)
	event.Available, event.MustInclude, event.Size = len(available), mustInclude, size
	response, err := e.api.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{
			AvailableDeviceIDs: available, MustIncludeDeviceIDs: mustInclude, AllocationSize: int32(size),
		}},
	})
	if len(response.GetContainerResponses()) > 0 {
		event.Devices = response.ContainerResponses[0].DeviceIDs
	}
	e.done(event, err)
	return response, err
}

func (e *endpoint) preStart(ctx context.Context, pod *corev1.Pod, container string, ids []string) error {
	if err := e.usable(); err != nil {
		return err
	}
	event := e.event(CallPreStartContainer, pod, container)
	event.Devices = ids
	ctx, cancel := context.WithTimeout(ctx, preStartTimeout)
	defer cancel()
	_, err := e.api.PreStartContainer(ctx, &pluginapi.PreStartContainerRequest{DevicesIds: ids})
	e.done(event, err)
	return err
}

func (e *endpoint) event(call Call, pod *corev1.Pod, container string) Event {
	return Event{
		Call: call, Resource: e.resource, PodUID: pod.UID, Namespace: pod.Namespace, Name: pod.Name,
		Container: container, Start: time.Now(),
	}
}

func (e *endpoint) done(event Event, err error) {
	event.End, event.Err = time.Now(), err
	e.trace(event)
}

// client is a connection to a plugin.
type client struct {
	resource string
	socket   string
	devices  *devices
	trace    func(Event)

	mu   sync.Mutex
	conn *grpc.ClientConn // nil once disconnected.
	api  pluginapi.DevicePluginClient
}

// connect dials the plugin and reads its options. ctx is that of the Register call.
func (c *client) connect(ctx context.Context) error {
	conn, err := dial(ctx, c.socket)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.conn, c.api = conn, pluginapi.NewDevicePluginClient(conn)
	c.mu.Unlock()

	event := Event{Call: CallGetDevicePluginOptions, Resource: c.resource, Start: time.Now()}
	options, err := c.api.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
	event.End, event.Err = time.Now(), err
	c.trace(event)
	if err != nil {
		return fmt.Errorf("failed to get device plugin options: %w", err)
	}
	c.devices.plugin(&endpoint{resource: c.resource, options: options, api: c.api, trace: c.trace})
	return nil
}

// watch processes the plugin's device lists until the stream ends. gRPC rejects messages over 4 MiB, which also ends
// it.
func (c *client) watch(ctx context.Context) {
	event := Event{Call: CallListAndWatch, Resource: c.resource}
	end := func(err error) {
		event.Start, event.End, event.Err = time.Now(), time.Now(), err
		c.trace(event)
		if !errors.Is(err, io.EOF) {
			klog.FromContext(ctx).V(2).Info("ListAndWatch ended", "resource", c.resource, "err", err)
		}
	}
	stream, err := c.api.ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		end(err)
		return
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			end(err)
			return
		}
		message := event
		message.Start, message.Available = time.Now(), len(response.Devices)
		c.devices.update(ctx, c.resource, response.Devices)
		message.End = time.Now()
		c.trace(message)
	}
}

func (c *client) disconnect(ctx context.Context) {
	c.close(ctx)
	c.devices.pluginGone(c.resource)
}

func (c *client) close(ctx context.Context) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn == nil {
		return
	}
	if err := c.conn.Close(); err != nil {
		klog.FromContext(ctx).V(2).Info("Could not close the plugin's connection", "resource", c.resource, "err", err)
	}
	c.conn = nil
}

// dial returns when the connection is ready.
func dial(ctx context.Context, socket string) (*grpc.ClientConn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := grpc.NewClient("passthrough:///"+socket,
		grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}))
	if err != nil {
		return nil, fmt.Errorf("failed to dial device plugin: %w", err)
	}
	for state := conn.GetState(); state != connectivity.Ready; state = conn.GetState() {
		if state == connectivity.Idle {
			conn.Connect()
		}
		if !conn.WaitForStateChange(ctx, state) {
			return nil, errors.Join(fmt.Errorf("failed to dial device plugin: %w", ctx.Err()), conn.Close())
		}
	}
	return conn, nil
}

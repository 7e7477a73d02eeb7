package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// dialTimeout is the time for connecting to a plugin's socket during its Register call (plugin/v1beta1/client.go). It is
// the only deadline for calls to a plugin.
const dialTimeout = 10 * time.Second

// registration serves kubelet.sock and manages the connections to the plugins (cm/devicemanager/plugin/v1beta1).
type registration struct {
	pluginapi.UnimplementedRegistrationServer
	dir     string
	devices *devices
	trace   func(Event)
	ctx     context.Context // Ends with this run of the kubelet; used for the plugins' streams.
	server  *grpc.Server
	wg      sync.WaitGroup

	mu      sync.Mutex
	plugins map[string]*plugin // The latest registration by resource.
}

// serveRegistration removes the sockets of earlier plugins and kubelets and starts the server.
func serveRegistration(ctx context.Context, options *Options, devices *devices) (*registration, error) {
	dir := options.devicePluginDir()
	if err := removeSockets(dir); err != nil {
		return nil, err
	}
	listener, err := listen(filepath.Join(dir, "kubelet.sock"))
	if err != nil {
		return nil, err
	}
	r := &registration{
		dir: dir, devices: devices, trace: options.Trace, ctx: ctx,
		server: grpc.NewServer(grpc.WaitForHandlers(true)), plugins: map[string]*plugin{},
	}
	pluginapi.RegisterRegistrationServer(r.server, r)
	r.wg.Go(func() {
		if err := r.server.Serve(listener); err != nil {
			klog.FromContext(ctx).Error(err, "Registration server ended")
		}
	})
	return r, nil
}

// stop ends the server and all connections; the context must have ended. The socket file stays, as after the kubelet is
// killed.
func (r *registration) stop() {
	r.server.Stop()
	r.mu.Lock()
	plugins := r.plugins
	r.plugins = map[string]*plugin{}
	r.mu.Unlock()
	for _, p := range plugins {
		r.disconnect(p)
	}
	r.wg.Wait()
}

// Register connects to the plugin and then answers.
func (r *registration) Register(ctx context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if request.Version != pluginapi.Version {
		return nil, fmt.Errorf("requested API version %q is not supported by kubelet", request.Version)
	}
	p := &plugin{resource: request.ResourceName, trace: r.trace}
	if err := p.open(filepath.Join(r.dir, request.Endpoint)); err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.plugins[p.resource] = p
	r.mu.Unlock()
	if err := p.connect(ctx); err != nil {
		r.forget(p.resource)
		return nil, errors.Join(err, p.conn.Close())
	}
	r.devices.registered(p)
	r.wg.Go(func() {
		r.watch(p)
		// The kubelet disconnects the resource's latest registration, even one that came while the old stream was ending
		// (server.runClient). Real plugins meet that race, so it is simulated.
		if latest := r.forget(p.resource); latest != nil {
			r.disconnect(latest)
		}
		_ = p.conn.Close() // It may be closed.
	})
	return &pluginapi.Empty{}, nil
}

// watch processes the plugin's device lists until the stream ends. gRPC rejects messages over 4 MiB, which also ends it.
func (r *registration) watch(p *plugin) {
	stream, err := p.api.ListAndWatch(r.ctx, &pluginapi.Empty{})
	for err == nil {
		err = traced(r.trace, Event{Call: CallListAndWatch}, func(*Event) error {
			response, err := stream.Recv()
			if err == nil {
				r.devices.update(r.ctx, p.resource, response.Devices)
			}
			return err
		})
	}
	if !errors.Is(err, io.EOF) {
		klog.FromContext(r.ctx).V(2).Info("ListAndWatch ended", "resource", p.resource, "err", err)
	}
}

// forget removes and returns the resource's registration, or nil if there is none.
func (r *registration) forget(resource string) *plugin {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.plugins[resource]
	delete(r.plugins, resource)
	return p
}

func (r *registration) disconnect(p *plugin) {
	_ = p.conn.Close() // It may be closed.
	r.devices.pluginGone(p.resource)
}

// plugin is one registration of a device plugin.
type plugin struct {
	resource string
	trace    func(Event)
	conn     *grpc.ClientConn
	api      pluginapi.DevicePluginClient
	// prefers is true if the plugin implements GetPreferredAllocation.
	prefers bool
	stopped atomic.Bool
}

func (p *plugin) open(socket string) (err error) {
	p.conn, err = grpc.NewClient("passthrough:///"+socket,
		grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}))
	if err != nil {
		return fmt.Errorf("failed to dial device plugin: %w", err)
	}
	p.api = pluginapi.NewDevicePluginClient(p.conn)
	return nil
}

// connect waits for the connection and reads the plugin's options. ctx is that of the Register call.
func (p *plugin) connect(ctx context.Context) error {
	dial, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	for state := p.conn.GetState(); state != connectivity.Ready; state = p.conn.GetState() {
		if state == connectivity.Idle {
			p.conn.Connect()
		}
		if !p.conn.WaitForStateChange(dial, state) {
			return fmt.Errorf("failed to dial device plugin: %w", dial.Err())
		}
	}
	options, err := p.api.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
	if err != nil {
		return fmt.Errorf("failed to get device plugin options: %w", err)
	}
	p.prefers = options.GetPreferredAllocationAvailable
	return nil
}

func (p *plugin) usable() error {
	if p.stopped.Load() {
		return fmt.Errorf("endpoint %s has been stopped", p.resource)
	}
	return nil
}

func (p *plugin) allocate(ctx context.Context, uid types.UID, ids []string) (response *pluginapi.AllocateResponse, err error) {
	if err := p.usable(); err != nil {
		return nil, err
	}
	err = traced(p.trace, Event{Call: CallAllocate, PodUID: uid}, func(event *Event) error {
		response, err = p.api.Allocate(ctx, &pluginapi.AllocateRequest{
			ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}},
		})
		if len(response.GetContainerResponses()) > 0 {
			event.Env = response.ContainerResponses[0].Envs
		}
		return err
	})
	return response, err
}

// preferred returns the IDs that the plugin prefers.
func (p *plugin) preferred(ctx context.Context, uid types.UID, available, mustInclude []string, size int) (ids []string, err error) {
	if err := p.usable(); err != nil {
		return nil, err
	}
	err = traced(p.trace, Event{Call: CallGetPreferredAllocation, PodUID: uid}, func(*Event) error {
		response, err := p.api.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{
				AvailableDeviceIDs: available, MustIncludeDeviceIDs: mustInclude, AllocationSize: int32(size),
			}},
		})
		if len(response.GetContainerResponses()) > 0 {
			ids = response.ContainerResponses[0].DeviceIDs
		}
		return err
	})
	return ids, err
}

// listen creates the socket's directory and listens. Closing the listener doesn't remove the file.
func listen(socket string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(socket), 0o750); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen: %w", err)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	listener.SetUnlinkOnClose(false)
	return listener, nil
}

// removeSockets creates the directory and removes the sockets in it, but no other files.
func removeSockets(dir string) error {
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return fmt.Errorf("making the device-plugin directory: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("clean device-plugin directory: %w", err)
	}
	for _, entry := range entries {
		if entry.Type()&os.ModeSocket != 0 {
			if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil {
				return fmt.Errorf("clean device-plugin directory: %w", err)
			}
		}
	}
	return nil
}

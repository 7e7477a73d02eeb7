package simkubelet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
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
	plugins map[string][]*plugin // The registrations by resource, the oldest first.
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
		server: grpc.NewServer(grpc.WaitForHandlers(true)), plugins: map[string][]*plugin{},
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
	r.plugins = map[string][]*plugin{}
	r.mu.Unlock()
	for _, registered := range plugins {
		for _, p := range registered {
			r.disconnect(p)
		}
	}
	r.wg.Wait()
}

// Register connects to the plugin and then answers.
func (r *registration) Register(ctx context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	if request.Version != pluginapi.Version {
		return nil, fmt.Errorf("requested API version %q is not supported by kubelet", request.Version)
	}
	p := &plugin{resource: request.ResourceName, socket: filepath.Join(r.dir, request.Endpoint), trace: r.trace}
	if err := p.open(); err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.plugins[p.resource] = append(r.plugins[p.resource], p)
	r.mu.Unlock()
	err := p.connect(ctx)
	if err == nil {
		err = r.devices.registered(p)
	}
	if err != nil {
		r.forget(p)
		return nil, errors.Join(err, p.conn.Close())
	}
	r.wg.Go(func() {
		r.watch(p)
		// The kubelet forgets all registrations with this socket, and disconnects the oldest (server.runClient). If a second
		// one with the same socket was refused meanwhile, none is left: then the kubelet takes the old one for connected until
		// the kubelet restarts, and refuses this socket. Real plugins can meet that race, so it is simulated.
		if oldest := r.forget(p); oldest != nil {
			r.disconnect(oldest)
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

// forget removes the registrations of the plugin's resource with its socket, and returns the oldest; nil if there is none.
func (r *registration) forget(p *plugin) (oldest *plugin) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.plugins[p.resource] = slices.DeleteFunc(r.plugins[p.resource], func(other *plugin) bool {
		if other.socket != p.socket {
			return false
		}
		oldest = cmp.Or(oldest, other)
		return true
	})
	return oldest
}

func (r *registration) disconnect(p *plugin) {
	_ = p.conn.Close() // It may be closed.
	r.devices.pluginGone(p)
}

// plugin is one registration of a device plugin.
type plugin struct {
	resource string
	socket   string
	trace    func(Event)
	conn     *grpc.ClientConn
	api      pluginapi.DevicePluginClient
	// prefers is true if the plugin implements GetPreferredAllocation.
	prefers bool
	stopped atomic.Bool
}

func (p *plugin) open() (err error) {
	p.conn, err = grpc.NewClient("passthrough:///"+p.socket,
		grpc.WithAuthority("localhost"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", p.socket)
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

package simkubelet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// registration serves kubelet.sock and manages the connections to the plugins (cm/devicemanager/plugin/v1beta1).
type registration struct {
	pluginapi.UnimplementedRegistrationServer
	options Options
	devices *devices
	ctx     context.Context // Ends with this run of the kubelet; used for the plugins' streams.
	server  *grpc.Server
	wg      sync.WaitGroup

	mu      sync.Mutex
	clients map[string]*client // The latest connection by resource.
}

// serveRegistration removes the sockets of earlier plugins and kubelets and starts the server.
func serveRegistration(ctx context.Context, options Options, devices *devices) (*registration, error) {
	if err := removeSockets(options.DevicePluginDir); err != nil {
		return nil, err
	}
	listener, err := listen(options.registrationSocket())
	if err != nil {
		return nil, err
	}
	r := &registration{options: options, devices: devices, ctx: ctx, server: grpc.NewServer(grpc.WaitForHandlers(true)), clients: map[string]*client{}}
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
	clients := r.clients
	r.clients = map[string]*client{}
	r.mu.Unlock()
	for _, c := range clients {
		c.disconnect(r.ctx)
	}
	r.wg.Wait()
}

// Register connects to the plugin and then answers.
func (r *registration) Register(ctx context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	event := Event{Call: CallRegister, Resource: request.ResourceName, Start: time.Now()}
	err := r.register(ctx, request)
	event.End, event.Err = time.Now(), err
	r.options.Trace(event)
	return &pluginapi.Empty{}, err
}

func (r *registration) register(ctx context.Context, request *pluginapi.RegisterRequest) error {
	if !slices.Contains(pluginapi.SupportedVersions[:], request.Version) {
		return fmt.Errorf("requested API version %q is not supported by kubelet. Supported version is %q",
			request.Version, pluginapi.SupportedVersions)
	}
	if !extendedResource(corev1.ResourceName(request.ResourceName)) {
		return fmt.Errorf("the ResourceName %q is invalid", request.ResourceName)
	}
	c := &client{
		resource: request.ResourceName,
		socket:   filepath.Join(r.options.DevicePluginDir, request.Endpoint),
		devices:  r.devices,
		trace:    r.options.Trace,
	}
	r.mu.Lock()
	r.clients[c.resource] = c
	r.mu.Unlock()
	if err := c.connect(ctx); err != nil {
		r.forget(c.resource)
		return err
	}
	r.wg.Go(func() {
		c.watch(r.ctx)
		// The kubelet disconnects the resource's latest connection, even one that registered while the old stream was
		// ending (server.runClient). Real plugins meet that race, so it is simulated.
		if latest := r.forget(c.resource); latest != nil {
			latest.disconnect(r.ctx)
		}
		c.close(r.ctx)
	})
	return nil
}

// forget removes and returns the resource's connection, or nil if there is none.
func (r *registration) forget(resource string) *client {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.clients[resource]
	delete(r.clients, resource)
	return c
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

func removeSockets(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("clean device-plugin directory: %w", err)
	}
	for _, entry := range entries {
		if entry.Type()&os.ModeSocket == 0 {
			continue
		}
		if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil {
			return fmt.Errorf("clean device-plugin directory: %w", err)
		}
	}
	return nil
}

// extendedResource reports whether the name is that of an extended resource (pkg/apis/core/v1/helper).
func extendedResource(name corev1.ResourceName) bool {
	if !strings.Contains(string(name), "/") || strings.Contains(string(name), corev1.ResourceDefaultNamespacePrefix) ||
		strings.HasPrefix(string(name), corev1.DefaultResourceRequestsPrefix) {
		return false
	}
	return len(validation.IsQualifiedName(corev1.DefaultResourceRequestsPrefix+string(name))) == 0
}

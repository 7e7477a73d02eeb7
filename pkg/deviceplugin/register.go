package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/wait"
	events "k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/file"
	"github.com/gpushare/gpushare/pkg/protocol"
)

const (
	kubeletSocketName = "kubelet.sock"
	// cleanup is the pause after a stream to the kubelet has ended. The kubelet cleans up after the old stream, and cuts a
	// new stream that starts meanwhile.
	cleanup = time.Second
	// registerTimeout bounds a registration, with the kubelet's dial back, for which it allows itself ten seconds.
	registerTimeout = 15 * time.Second
	// listenGrace is how long a kubelet may have no ListAndWatch stream after the registration.
	listenGrace = 10 * time.Second
	// socketPoll is the interval at which the kubelet's socket is checked: a kubelet that starts fails the pods that it admits before the plugin has
	// registered.
	socketPoll = 100 * time.Millisecond
	// absence is how long the kubelet may be away before the node gets an Event: a restart takes seconds.
	absence = time.Minute
	// maxRequest is the size limit of requests, in bytes: a request can name every device of a node.
	maxRequest = 4 * maxMessage
)

// registrar keeps the plugin registered. It serves and registers again if the kubelet was restarted, or has ended its stream.
type registrar struct {
	dir     string
	service *service
	cards   *cardState
	events  events.EventRecorder
	// node is the object of the Events.
	node *corev1.ObjectReference
	// beforeRegister is called before each registration with a kubelet.
	beforeRegister func(context.Context)
	// podResources is the socket of the kubelet's PodResources service; empty if the kubelet isn't to be asked.
	podResources string
	// cleanup and absence are the constants of the same names.
	cleanup, absence time.Duration
	// tried is the kubelet's socket at the last attempt.
	tried fs.FileInfo
}

// Run serves until ctx ends.
func (r *registrar) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	backoff := newRegistrationBackoff()
	seen, warned := time.Now(), false // When the plugin was registered last, or had nothing to register; and whether it has warned since.
	for ctx.Err() == nil {
		view := r.cards.Get()
		if view.Problem != nil {
			logger.Error(view.Problem, "Could not offer GPU memory to the kubelet")
			select {
			case <-ctx.Done():
			case <-view.Changed:
			}
			seen, warned = time.Now(), false
			continue
		}
		registered, err := r.session(ctx)
		if ctx.Err() != nil {
			return nil
		}
		delay := r.cleanup
		if registered {
			backoff, seen, warned = newRegistrationBackoff(), time.Now(), false
		} else {
			if !warned && time.Since(seen) > r.absence {
				warned = true
				r.events.Eventf(r.node, corev1.EventTypeWarning, eventNotOffered, "no kubelet has taken the plugin in %s for %v: the kubelet is down or "+
					"refuses the plugin, or --device-plugin-dir is not its directory: %v", r.dir, r.absence, err)
			}
			delay = backoff.Step()
		}
		logger.Info("Not registered with the kubelet, trying again", "delay", delay, "err", err)
		if r.pause(ctx, delay) {
			backoff = newRegistrationBackoff()
		}
	}
	return nil
}

// newRegistrationBackoff returns a backoff with short delays at first: a kubelet serves soon after its socket exists.
func newRegistrationBackoff() wait.Backoff {
	return wait.Backoff{Duration: 20 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 15, Cap: 30 * time.Second}
}

// pause waits for delay, but returns at once if there is a kubelet that has not been tried yet, and reports whether there
// is. A kubelet that has just started has no old stream to clean up, and it admits and fails its pods within a second.
func (r *registrar) pause(ctx context.Context, delay time.Duration) (fresh bool) {
	return wait.PollUntilContextTimeout(ctx, socketPoll, delay, true, func(context.Context) (bool, error) { return r.fresh(), nil }) == nil
}

// session serves and registers once. It returns when both must be repeated, with the reason. registered reports whether
// the registration succeeded.
//
// session reaches the kubelet before it creates its own socket, and registers only with this kubelet. A kubelet that starts clears its
// directory and listens after that. A socket that was created earlier is gone at the registration: the kubelet then dials it for ten
// seconds and meanwhile fails the pods that ask for a device (k8s.io/kubernetes
// pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, Start).
func (r *registrar) session(ctx context.Context) (registered bool, err error) {
	if err := r.reach(ctx); err != nil {
		return false, err
	}
	serving, err := r.serve()
	if err != nil {
		return false, err
	}
	defer serving.stop()
	// The plugin serves before it registers, because the kubelet dials back during the registration.
	r.beforeRegister(ctx)
	if r.fresh() {
		return false, errRestarted
	}
	if err := r.register(ctx, serving.socket); err != nil {
		return false, err
	}
	r.service.metrics.registrations.Inc()
	logger := klog.FromContext(ctx)
	logger.Info("Registered with the kubelet", "resource", protocol.ResourceMemory, "socket", serving.socket)
	if n := countDevices(r.cards.Get().Cards); n >= manyDevices {
		logger.Info("Warning: from Kubernetes 1.36 on, the kubelet can hang for minutes now, because it has many devices and the feature gates "+
			"ResourceHealthStatus and ResourceHealthStatusMessage: switch both off, or use a larger unit (docs/units.md)", "devices", int64(n))
	}
	return true, r.watch(ctx, serving)
}

// fresh reports whether there is a kubelet that has not been tried yet.
func (r *registrar) fresh() bool {
	now, err := os.Stat(filepath.Join(r.dir, kubeletSocketName))
	return err == nil && !file.Same(r.tried, now)
}

// reach returns an error if no kubelet serves the socket.
func (r *registrar) reach(ctx context.Context) (err error) {
	socket := filepath.Join(r.dir, kubeletSocketName)
	if r.tried, err = os.Stat(socket); err != nil {
		return fmt.Errorf("looking for the kubelet: %w", err)
	}
	connection, err := new(net.Dialer).DialContext(ctx, "unix", socket)
	if err != nil {
		return fmt.Errorf("connecting to the kubelet: %w", err)
	}
	return connection.Close()
}

// serving is a gRPC server on a socket of its own.
type serving struct {
	// socket is the name of the socket's file.
	socket string
	// former is the number of streams that had begun before.
	former int64
	server *grpc.Server
	// ended is closed when the server has ended, with err, which is set before that.
	ended chan struct{}
	err   error
}

// serve starts to serve on a new socket. The caller calls stop. Each registration has its own socket: a kubelet 1.37 refuses one that it takes for
// connected, and if one is registered while its old stream is ending, it takes it for connected until the kubelet restarts (k8s.io/kubernetes v1.37
// pkg/kubelet/cm/devicemanager/plugin/v1beta1/handler.go, connectClient and runClient). A socket that a killed plugin has left is removed by the
// next kubelet that starts.
func (r *registrar) serve() (*serving, error) {
	s := &serving{
		socket: "gpushare-" + rand.String(5) + ".sock", former: r.service.streams.Load(), ended: make(chan struct{}),
		// A stream of this server must not count as one of the next.
		server: grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest), grpc.UnaryInterceptor(r.service.count), grpc.WaitForHandlers(true)),
	}
	listener, err := net.Listen("unix", filepath.Join(r.dir, s.socket))
	if err != nil {
		return nil, fmt.Errorf("listening on the own socket: %w", err)
	}
	pluginapi.RegisterDevicePluginServer(s.server, r.service)
	go func() {
		defer close(s.ended)
		s.err = s.server.Serve(listener)
	}()
	return s, nil
}

// stop closes the streams, and removes the socket.
func (s *serving) stop() {
	s.server.Stop()
	<-s.ended
}

// watch returns why the plugin must serve and register again, or nil once ctx has ended and the calls in progress are answered.
func (r *registrar) watch(ctx context.Context, own *serving) error {
	ticker := time.NewTicker(socketPoll)
	defer ticker.Stop()
	registered := time.Now()
	for {
		r.checkPodResources(registered)
		view := r.cards.Get()
		// A stream can begin and end between two steps of the loop. Read before Listening, or one that begins now would count as ended.
		listened := r.service.streams.Load() > own.former
		switch {
		case view.Problem != nil:
			return view.Problem
		case r.fresh():
			return errRestarted
		case r.service.Listening(): // The connection outlives the sockets.
		case listened:
			return errors.New("the kubelet has ended its stream")
		case time.Since(registered) > listenGrace:
			return errors.New("the kubelet doesn't listen to the plugin")
		}
		select {
		case <-ctx.Done():
			r.service.finish(own.server)
			return nil
		case <-own.ended:
			return fmt.Errorf("serving: %w", own.err)
		case <-view.Changed:
		case <-ticker.C:
		}
	}
}

// checkPodResources reports a missing socket once the plugin has been registered for so long that the kubelet has made it.
func (r *registrar) checkPodResources(registered time.Time) {
	if r.podResources == "" || time.Since(registered) <= r.absence {
		return
	}
	if _, err := os.Stat(r.podResources); errors.Is(err, fs.ErrNotExist) {
		r.events.Eventf(r.node, corev1.EventTypeWarning, eventCannotAsk, "the kubelet has no socket %s, so the plugin can't ask which pod it starts, and can "+
			"take one for another: --pod-resources-socket must be in pod-resources of the kubelet's --root-dir", r.podResources)
	}
	r.podResources = "" // It was checked.
}

var errRestarted = errors.New("the kubelet was restarted")

// register registers the plugin's socket with the kubelet.
func (r *registrar) register(ctx context.Context, socket string) error {
	connection, err := grpc.NewClient("unix:"+filepath.Join(r.dir, kubeletSocketName), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connecting to the kubelet: %w", err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	_, err = pluginapi.NewRegistrationClient(connection).Register(ctx, &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     socket,
		ResourceName: string(protocol.ResourceMemory),
		Options:      options(),
	})
	if err != nil {
		return fmt.Errorf("registering with the kubelet: %w", err)
	}
	return nil
}

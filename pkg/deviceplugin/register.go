package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

const (
	// socketName is ours, in the kubelet's directory.
	socketName = "gpushare.sock"
	// kubeletSocketName is the kubelet's.
	kubeletSocketName = "kubelet.sock"
	// settle is how long to wait after a stream to the kubelet ended: it cleans up behind the old stream, and cuts a new
	// one that comes in between.
	settle = time.Second
	// registerTimeout covers the kubelet's dialling back, for which it allows itself ten seconds.
	registerTimeout = 15 * time.Second
	// listenGrace is how long a registered kubelet may be without a ListAndWatch stream.
	listenGrace = 10 * time.Second
	// maxRequest is for requests that name every device of a node.
	maxRequest = 4 * maxMessage
)

// registrar keeps the plugin registered: it serves, registers, and does both again when the kubelet was restarted, the
// directory was cleaned or the kubelet stopped listening.
type registrar struct {
	dir     string
	service *service
	cards   *cardState
	// before is called before each registration with a kubelet.
	before func(context.Context)
	// refused is told why the kubelet doesn't want the plugin.
	refused func(reason error)
	wake    chan struct{}
	settle  time.Duration
	// tried is the kubelet's socket at the last attempt.
	tried fs.FileInfo
}

// Run serves until the context ends.
func (r *registrar) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	backoff := newRegistrationBackoff()
	told, refusal := "", ""
	for ctx.Err() == nil {
		_, changed, problem := r.cards.Get()
		if problem != nil {
			if problem.Error() != told {
				logger.Error(problem, "Not offering GPU memory to the kubelet")
				told = problem.Error()
			}
			select {
			case <-ctx.Done():
			case <-changed:
			}
			continue
		}
		told = ""
		registered, err := r.session(ctx)
		if ctx.Err() != nil {
			return nil
		}
		delay := r.settle
		if registered {
			backoff, refusal = newRegistrationBackoff(), ""
		} else {
			if !transient(err) && err.Error() != refusal {
				refusal = err.Error()
				r.refused(err)
			}
			delay = backoff.Step()
		}
		logger.Info("Not registered with the kubelet: trying again", "after", delay, "reason", err.Error())
		if r.pause(ctx, delay) {
			backoff = newRegistrationBackoff()
		}
	}
	return nil
}

// newRegistrationBackoff starts fast: a kubelet's socket is there some moments before it serves.
func newRegistrationBackoff() wait.Backoff {
	return wait.Backoff{Duration: 20 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 15, Cap: 30 * time.Second}
}

// pause waits, but not for a kubelet that hasn't been tried yet: one that has just started has no old stream to clean up
// behind, and it admits, and fails, its pods within the second. It says whether there is such a one.
func (r *registrar) pause(ctx context.Context, delay time.Duration) (fresh bool) {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	for {
		now, err := os.Stat(filepath.Join(r.dir, kubeletSocketName))
		if err == nil && !sameFile(r.tried, now) {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-timer.C:
			return false
		case <-r.wake:
		}
	}
}

// session serves and registers once, and stays until there is a reason to do so anew, which it returns. registered says
// that it came that far.
//
// The kubelet is reached first: one that starts clears its directory and listens then, so that a socket which was made
// before is gone when it registers, and the kubelet dials it for ten seconds while it fails the pods that want a device
// (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/plugin/v1beta1/server.go, Start).
func (r *registrar) session(ctx context.Context) (registered bool, err error) {
	kubeletSocket, socket := filepath.Join(r.dir, kubeletSocketName), filepath.Join(r.dir, socketName)
	kubelet, err := os.Stat(kubeletSocket)
	if err != nil {
		return false, fmt.Errorf("looking for the kubelet: %w", err)
	}
	r.tried = kubelet
	connection, err := new(net.Dialer).DialContext(ctx, "unix", kubeletSocket)
	if err != nil {
		return false, fmt.Errorf("connecting to the kubelet: %w", err)
	}
	defer connection.Close()
	if !unchanged(kubeletSocket, kubelet) {
		return false, errRestarted
	}

	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("removing the old socket: %w", err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return false, fmt.Errorf("listening on %s: %w", socket, err)
	}
	server := grpc.NewServer(grpc.MaxRecvMsgSize(maxRequest), grpc.UnaryInterceptor(r.service.count))
	pluginapi.RegisterDevicePluginServer(server, r.service)
	var serving error // Written before ended is closed.
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		serving = server.Serve(listener)
	}()
	defer func() {
		server.Stop() // Closes the streams and removes the socket.
		<-ended
	}()
	own, err := os.Stat(socket)
	if err != nil {
		return false, fmt.Errorf("looking at the own socket: %w", err)
	}

	// Served before registered: the kubelet dials back while it registers.
	r.before(ctx)
	if err := register(ctx, connection); err != nil {
		return false, err
	}
	r.service.metrics.registrations.Inc()
	klog.FromContext(ctx).Info("Registered with the kubelet", "resource", protocol.ResourceMemory, "socket", socket)

	ticker := time.NewTicker(lookAgain)
	defer ticker.Stop()
	silent := time.Now()
	for {
		_, changed, problem := r.cards.Get()
		switch {
		case problem != nil:
			return true, problem
		case !unchanged(socket, own):
			return true, errors.New("the plugin's socket was removed")
		case !unchanged(kubeletSocket, kubelet):
			return true, errRestarted
		case r.service.Listening():
			silent = time.Now()
		case time.Since(silent) > listenGrace:
			return true, errors.New("the kubelet doesn't listen to the plugin")
		}
		select {
		case <-ctx.Done():
			r.service.finish(server)
			return true, nil
		case <-ended:
			return true, fmt.Errorf("serving: %w", serving)
		case <-changed:
		case <-r.wake:
		case <-ticker.C:
		}
	}
}

var errRestarted = errors.New("the kubelet was restarted")

// transient says whether an attempt to register failed for the kubelet's not being there at the moment.
func transient(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return true
	}
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EAGAIN) ||
		errors.Is(err, errRestarted)
}

// unchanged says whether a path still is the file that it was.
func unchanged(path string, was fs.FileInfo) bool {
	now, err := os.Stat(path)
	return err == nil && sameFile(was, now)
}

// register tells the kubelet at the other end of the plugin. One that takes its place meanwhile isn't dialled: it has cleared
// away the plugin's socket.
func register(ctx context.Context, kubelet net.Conn) error {
	once := make(chan net.Conn, 1)
	once <- kubelet
	dial := func(context.Context, string) (net.Conn, error) {
		select {
		case c := <-once:
			return c, nil
		default:
			return nil, errRestarted
		}
	}
	connection, err := grpc.NewClient("passthrough:///kubelet", grpc.WithContextDialer(dial), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connecting to the kubelet: %w", err)
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	_, err = pluginapi.NewRegistrationClient(connection).Register(ctx, &pluginapi.RegisterRequest{
		Version:      pluginapi.Version,
		Endpoint:     socketName,
		ResourceName: string(protocol.ResourceMemory),
		Options:      options(),
	})
	if err != nil {
		return fmt.Errorf("registering with the kubelet: %w", err)
	}
	return nil
}

package deviceplugin

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// service serves the kubelet's calls.
type service struct {
	pluginapi.UnimplementedDevicePluginServer
	allocator *allocator
	cards     *cardState
	metrics   *metrics
	logger    klog.Logger
	// onSent is called with the cards of each message that was sent to the kubelet.
	onSent func([]gpu.Card)
	// listening is the number of open ListAndWatch streams, streams that of all that have begun.
	listening, streams atomic.Int64
	// readmission shows which devices a kubelet that starts must find healthy.
	readmission *readmission
	// interval is the minimum time between two messages of a stream. The kubelet writes its checkpoint at each message,
	// so an unsteady card must not flood it.
	interval time.Duration

	// stop is closed when ListAndWatch must return.
	stop chan struct{}

	// callGap is longer than the time between two calls for one pod, see finish.
	callGap time.Duration
	// calls guards underWay, the number of the kubelet's calls in progress, and ended, when a call last ended.
	calls    sync.Mutex
	underWay int
	ended    time.Time
}

const (
	// finishTimeout is how long a plugin that stops waits for the pods that the kubelet is admitting.
	finishTimeout = 5 * time.Second
	finishPoll    = 20 * time.Millisecond
	// drainTimeout is how long it then waits for the end of calls in progress.
	drainTimeout = 2 * time.Second
)

// count is an interceptor that counts the calls in progress for finish.
func (s *service) count(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	s.calls.Lock()
	s.underWay++
	s.calls.Unlock()
	defer func() {
		s.calls.Lock()
		defer s.calls.Unlock()
		s.underWay--
		s.ended = time.Now()
	}()
	return handle(ctx, request)
}

// finish stops the server; the caller stops what is left. It is called once. The kubelet fails a pod for good if a call for
// it is cut off. finish therefore waits until no call is in progress and none follows the last one: the kubelet admits no pod. Between the calls for a
// pod the kubelet writes its checkpoint, which can be slow on a busy machine.
func (s *service) finish(server *grpc.Server) {
	// The plugin's context has already ended, so these waits have their own timeouts.
	_ = wait.PollUntilContextTimeout(context.Background(), finishPoll, finishTimeout, true, func(context.Context) (bool, error) {
		s.calls.Lock()
		defer s.calls.Unlock()
		return s.underWay == 0 && time.Since(s.ended) > s.callGap, nil
	})
	close(s.stop)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		server.GracefulStop()
	}()
	select {
	case <-stopped:
	case <-time.After(drainTimeout):
	}
}

// Listening reports whether the kubelet has an open ListAndWatch stream.
func (s *service) Listening() bool { return s.listening.Load() > 0 }

// options returns the plugin's options, for the registration and for GetDevicePluginOptions.
func options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}
}

func (s *service) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return options(), nil
}

// ListAndWatch sends all devices, and sends them again after each change of cardState, at most once per interval. The kubelet calls it once
// for each registration.
func (s *service) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	s.listening.Add(1) // Before streams, which registrar.watch reads first.
	s.streams.Add(1)
	defer s.listening.Add(-1)
	ctx, readmitted := klog.NewContext(stream.Context(), s.logger), time.After(s.readmission.time)
	for keeps := true; ; {
		view := s.cards.Get()
		if view.Problem != nil {
			return status.Error(codes.FailedPrecondition, view.Problem.Error())
		}
		message := &pluginapi.ListAndWatchResponse{Devices: devices(view.Cards)}
		if keeps {
			message.Devices = s.readmission.Keep(ctx, message.Devices)
		}
		if err := stream.Send(message); err != nil {
			return err
		}
		s.logger.V(2).Info("Reported the cards to the kubelet", "cards", len(view.Cards))
		s.onSent(view.Cards)
		select {
		case <-ctx.Done():
			return nil
		case <-s.stop:
			return nil
		case <-view.Changed:
		case <-readmitted:
			keeps = false
		}
		select {
		case <-ctx.Done():
			return nil
		case <-s.stop:
			return nil
		case <-time.After(s.interval):
		}
	}
}

func (s *service) GetPreferredAllocation(ctx context.Context, request *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	ctx = klog.NewContext(ctx, s.logger)
	response := &pluginapi.PreferredAllocationResponse{}
	for _, r := range request.GetContainerRequests() {
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{
			DeviceIDs: s.allocator.Prefer(ctx, r.GetAvailableDeviceIDs(), r.GetMustIncludeDeviceIDs(), int(r.GetAllocationSize())),
		})
	}
	return response, nil
}

func (s *service) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	ctx = klog.NewContext(ctx, s.logger)
	response := &pluginapi.AllocateResponse{}
	for _, r := range request.GetContainerRequests() {
		container, err := s.allocator.Allocate(ctx, r.GetDevicesIds())
		if err != nil {
			return nil, err
		}
		response.ContainerResponses = append(response.ContainerResponses, container)
	}
	return response, nil
}

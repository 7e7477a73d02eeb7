package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// The kubelet serves 100 requests per second, with bursts of 10, for all clients together (k8s.io/kubernetes
// pkg/kubelet/apis/podresources/constants.go). The plugin leaves some of them to other clients.
const (
	askPerSecond = 95
	askBurst     = 9
	askTries     = 3
	// askTimeout bounds all requests for one allocation: allocation.MaxQuestions requests take half of it.
	askTimeout = time.Second
	// answerTimeout bounds one request, which takes a few milliseconds.
	answerTimeout = askTimeout / 2
	// The kubelet waits while the plugin asks, so a service that gives no useful answer is not asked again for some time:
	// shortest if it can't be reached, longer if it doesn't answer, and longest if it has known no pod in uselessAfter
	// requests.
	pauseUnreachable = time.Second
	pauseSilent      = 5 * time.Second
	pauseUseless     = 10 * time.Minute
	uselessAfter     = 2 * allocation.MaxQuestions
	// A kubelet takes a list of devices within milliseconds, unless the machine is very busy.
	takeInterval = 100 * time.Millisecond
	takeTimeout  = 5 * time.Second
	// maxAllocatable is the size limit, in bytes, of the kubelet's list of all devices. It repeats the name of the resource for each
	// device, so it is larger than the list that the plugin has sent, and it has the devices of other plugins too.
	maxAllocatable = 4 * maxMessage
)

// podResources asks the kubelet's PodResources service about single pods. It never calls List, which changes the
// kubelet's bookkeeping. A nil podResources answers unknown. The allocator's mutex guards its fields, except client and limiter, which any
// goroutine may use.
type podResources struct {
	connection *grpc.ClientConn
	client     podresourcesv1.PodResourcesListerClient
	limiter    *rate.Limiter
	// answered is true once the service has known a pod. unknown counts the requests before that.
	answered bool
	unknown  int
	// pausedUntil is the time until which the service is not asked.
	pausedUntil time.Time
}

// newPodResources returns a client of the socket, and nil if there is no socket. The client connects lazily, because the
// socket is removed and created with the kubelet.
func newPodResources(socket string) (*podResources, error) {
	if socket == "" {
		return nil, nil
	}
	connection, err := grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{
			BaseDelay: 100 * time.Millisecond, Multiplier: 2, Jitter: 0.2, MaxDelay: 2 * time.Second,
		}}))
	if err != nil {
		return nil, fmt.Errorf("connecting to PodResources at %s: %w", socket, err)
	}
	return &podResources{
		connection: connection,
		client:     podresourcesv1.NewPodResourcesListerClient(connection),
		limiter:    rate.NewLimiter(askPerSecond, askBurst),
	}, nil
}

func (p *podResources) Close() {
	if p != nil {
		_ = p.connection.Close() // The only error is that the connection is already closed.
	}
}

// Renew makes the client ask again at once: a kubelet that has just started can be another version.
func (p *podResources) Renew() {
	if p == nil {
		return
	}
	p.pausedUntil, p.unknown, p.answered = time.Time{}, 0, false
	p.connection.ResetConnectBackoff()
}

// Answers reports whether this kubelet has known a pod so far. Before Kubernetes 1.34 the kubelet has the call switched off,
// and answers with the same code as for a pod that it doesn't know.
func (p *podResources) Answers() bool { return p != nil && p.answered }

// State asks the kubelet for the state of a candidate. If the kubelet can't answer, above all because of its rate
// limit, the result is unknown and never absent.
func (p *podResources) State(ctx context.Context, c allocation.Candidate) allocation.KubeletState {
	if p == nil || time.Now().Before(p.pausedUntil) {
		return allocation.StateUnknown
	}
	for range askTries {
		if err := p.limiter.Wait(ctx); err != nil {
			klog.FromContext(ctx).V(2).Info("No time left to ask the kubelet about a pod", "pod", klog.KRef(c.Pod.Namespace, c.Pod.Name), "err", err)
			return allocation.StateUnknown
		}
		asked, cancel := context.WithTimeout(ctx, answerTimeout)
		response, err := p.client.Get(asked, &podresourcesv1.GetPodResourcesRequest{
			PodName: c.Pod.Name, PodNamespace: c.Pod.Namespace,
		})
		cancel()
		switch status.Code(err) {
		case codes.OK:
			p.answered = true
			return stateOf(c, response.GetPodResources())
		case codes.Unknown, codes.NotFound:
			// Kubelets up to 1.37 have no better code than the first for a pod that they can't find.
			p.unknown++
			if !p.answered && p.unknown >= uselessAfter {
				p.pausedUntil = time.Now().Add(pauseUseless)
			}
			return allocation.StateAbsent
		case codes.ResourceExhausted:
			continue // Other clients use the same limit.
		case codes.DeadlineExceeded:
			if ctx.Err() == nil {
				p.pausedUntil = time.Now().Add(pauseSilent)
				klog.FromContext(ctx).Info("No answer from the kubelet about a pod", "pod", klog.KRef(c.Pod.Namespace, c.Pod.Name), "timeout", answerTimeout)
			}
			return allocation.StateUnknown
		default:
			p.pausedUntil = time.Now().Add(pauseUnreachable)
			klog.FromContext(ctx).V(2).Info("Could not ask the kubelet about a pod", "pod", klog.KRef(c.Pod.Namespace, c.Pod.Name), "err", err)
			return allocation.StateUnknown
		}
	}
	return allocation.StateUnknown
}

// Knows reports whether the kubelet answers that it knows the pod. Any goroutine may call it.
func (p *podResources) Knows(ctx context.Context, pod *allocation.Pod) bool {
	if p == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	if err := p.limiter.Wait(ctx); err != nil {
		return false
	}
	_, err := p.client.Get(ctx, &podresourcesv1.GetPodResourcesRequest{PodName: pod.Name, PodNamespace: pod.Namespace})
	return err == nil
}

// AwaitDevices waits until the kubelet has the healthy devices that the plugin has sent it, and no others. It returns at once if the
// kubelet can't answer, and after takeTimeout in any case. It returns false if the kubelet may not have them: ctx has ended, or changed
// was closed because another list must be sent. Any goroutine may call it.
func (p *podResources) AwaitDevices(ctx context.Context, sent []*pluginapi.Device, changed <-chan struct{}) bool {
	if p == nil {
		return true
	}
	want := sets.New[string]()
	for _, device := range sent {
		if device.Health == pluginapi.Healthy {
			want.Insert(device.ID)
		}
	}
	outdated := false
	_ = wait.PollUntilContextTimeout(ctx, takeInterval, takeTimeout, true, func(ctx context.Context) (bool, error) {
		select {
		case <-changed:
			outdated = true
			return true, nil
		default:
		}
		if err := p.limiter.Wait(ctx); err != nil {
			return false, err
		}
		response, err := p.client.GetAllocatableResources(ctx, &podresourcesv1.AllocatableResourcesRequest{}, grpc.MaxCallRecvMsgSize(maxAllocatable))
		if status.Code(err) == codes.ResourceExhausted {
			return false, nil // Other clients use the same limit.
		}
		has := sets.New[string]()
		for _, devices := range response.GetDevices() {
			if corev1.ResourceName(devices.ResourceName) == protocol.ResourceMemory {
				has.Insert(devices.DeviceIds...)
			}
		}
		return has.Equal(want), err
	})
	return !outdated && ctx.Err() == nil
}

// stateOf reads the state of a candidate from the kubelet's answer about an admitted pod.
func stateOf(c allocation.Candidate, pod *podresourcesv1.PodResources) allocation.KubeletState {
	decisive := map[string]bool{c.Container.Name: true}
	if c.Container.Init {
		// Ordinary init containers aren't listed. Such a container still waits if no container after it has devices.
		// Sidecars before it already have theirs.
		for _, other := range slices.Backward(c.Pod.Containers) {
			if other.Name == c.Container.Name {
				break
			}
			decisive[other.Name] = true
		}
	}
	for _, container := range pod.GetContainers() {
		if !decisive[container.Name] {
			continue
		}
		for _, devices := range container.Devices {
			if corev1.ResourceName(devices.ResourceName) == protocol.ResourceMemory && len(devices.DeviceIds) > 0 {
				return allocation.StateAllocated
			}
		}
	}
	return allocation.StateWaiting
}

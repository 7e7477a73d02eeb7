package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// The kubelet serves 100 requests per second, with bursts of 10, for all clients together (k8s.io/kubernetes
// pkg/kubelet/apis/podresources/constants.go). The plugin leaves some of them to other clients.
const (
	askPerSecond = 95
	askBurst     = 9
	// askTimeout bounds all requests for one decision: allocation.MaxQuestions requests take half of it.
	askTimeout = time.Second
)

// podResources asks the kubelet's PodResources service about single pods. It never calls List, which changes the
// kubelet's bookkeeping. A nil podResources answers unknown. Any goroutine may use it.
type podResources struct {
	connection *grpc.ClientConn
	client     podresourcesv1.PodResourcesListerClient
	limiter    *rate.Limiter
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

// Renew makes the client connect again at once: the kubelet has just started.
func (p *podResources) Renew() {
	if p != nil {
		p.connection.ResetConnectBackoff()
	}
}

// State asks the kubelet for the state of a candidate. If the kubelet can't answer, above all because of its rate
// limit, the result is unknown and never absent.
func (p *podResources) State(ctx context.Context, c allocation.Candidate) allocation.KubeletState {
	if p == nil {
		return allocation.StateUnknown
	}
	for {
		response, err := p.get(ctx, c.Pod)
		switch {
		case err == nil:
			return stateOf(c, response.GetPodResources())
		case isUnknownPod(err):
			return allocation.StateAbsent
		case status.Code(err) == codes.ResourceExhausted: // Other clients use the same limit.
		default:
			klog.FromContext(ctx).V(2).Info("Could not ask the kubelet about a pod", "pod", klog.KRef(c.Pod.Namespace, c.Pod.Name), "err", err)
			return allocation.StateUnknown
		}
	}
}

// get asks about a pod, within the limit of requests.
func (p *podResources) get(ctx context.Context, pod *allocation.Pod) (*podresourcesv1.GetPodResourcesResponse, error) {
	if err := p.limiter.Wait(ctx); err != nil {
		return nil, err
	}
	return p.client.Get(ctx, &podresourcesv1.GetPodResourcesRequest{PodName: pod.Name, PodNamespace: pod.Namespace})
}

// isUnknownPod reports whether the kubelet answers that it doesn't know the pod. Kubelets up to 1.37 have no code for that, and those before 1.34 answer
// with the same code that the call is switched off.
func isUnknownPod(err error) bool {
	return strings.HasSuffix(status.Convert(err).Message(), "not found")
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

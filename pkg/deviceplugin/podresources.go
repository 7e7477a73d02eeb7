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
	"k8s.io/klog/v2"
	podresourcesv1 "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// The kubelet answers 100 questions a second, 10 at once, for all its clients together
// (k8s.io/kubernetes pkg/kubelet/apis/podresources/constants.go). Some are left to others.
const (
	askPerSecond = 95
	askBurst     = 9
	askTries     = 3
	// askTimeout bounds all questions for one allocation: maxAsked of them take half of it.
	askTimeout = time.Second
	// answerTimeout bounds one answer, which takes a few milliseconds.
	answerTimeout = askTimeout / 2
	// A service that can't be reached is left alone for a moment, one that keeps silent for longer, and one that never
	// knew a pod, however many it was asked about, for longer yet: the kubelet waits while it is asked in vain.
	leaveUnreachable = time.Second
	leaveSilent      = 5 * time.Second
	leaveUseless     = 10 * time.Minute
	uselessAfter     = 2 * maxAsked
)

// podResources asks the kubelet's PodResources service about single pods. It never uses List, which changes the
// kubelet's bookkeeping. A nil one knows nothing. It belongs to who has the allocator's turn.
type podResources struct {
	connection *grpc.ClientConn
	client     podresourcesv1.PodResourcesListerClient
	limiter    *rate.Limiter
	// answered says that it has known a pod, unknown how often it hasn't before that.
	answered bool
	unknown  int
	// alone is until when it isn't asked.
	alone time.Time
}

// newPodResources connects lazily: the socket comes and goes with the kubelet.
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

// Close ends the connection.
func (p *podResources) Close() {
	if p != nil {
		_ = p.connection.Close() // It says no more than that it is closed already.
	}
}

// Renew is for a kubelet that has just started.
func (p *podResources) Renew() {
	if p == nil {
		return
	}
	p.alone, p.unknown = time.Time{}, 0
	p.connection.ResetConnectBackoff()
}

// Answers says whether the kubelet has been seen to answer. Before Kubernetes 1.34 it has the call switched off, and
// says so with the same code as for a pod that it doesn't know.
func (p *podResources) Answers() bool { return p != nil && p.answered }

// Standing asks where a candidate stands. All that keeps the kubelet from telling, its rate limit first of all, comes
// out as unknown, never as absent.
func (p *podResources) Standing(ctx context.Context, c candidate) standing {
	if p == nil || time.Now().Before(p.alone) {
		return unknown
	}
	for range askTries {
		if err := p.limiter.Wait(ctx); err != nil {
			klog.FromContext(ctx).V(2).Info("No time left to ask the kubelet about a pod", "pod", c.Pod.String(), "reason", err.Error())
			return unknown
		}
		asked, cancel := context.WithTimeout(ctx, answerTimeout)
		response, err := p.client.Get(asked, &podresourcesv1.GetPodResourcesRequest{
			PodName: c.Pod.Name, PodNamespace: c.Pod.Namespace,
		})
		cancel()
		switch status.Code(err) {
		case codes.OK:
			p.answered = true
			return standingOf(c, response.GetPodResources())
		case codes.Unknown:
			// It has no better code for a pod that it can't find.
			if p.unknown++; !p.answered && p.unknown >= uselessAfter {
				p.alone = time.Now().Add(leaveUseless)
			}
			return absent
		case codes.ResourceExhausted:
			continue // Others ask as well.
		case codes.DeadlineExceeded:
			if ctx.Err() == nil {
				p.alone = time.Now().Add(leaveSilent)
				klog.FromContext(ctx).Info("The kubelet doesn't answer about a pod", "pod", c.Pod.String(), "for", answerTimeout)
			}
			return unknown
		default:
			p.alone = time.Now().Add(leaveUnreachable)
			klog.FromContext(ctx).V(2).Info("The kubelet can't be asked about a pod", "pod", c.Pod.String(), "reason", err.Error())
			return unknown
		}
	}
	return unknown
}

// standingOf reads the kubelet's books of a pod that it has admitted.
func standingOf(c candidate, pod *podresourcesv1.PodResources) standing {
	telling := map[string]bool{c.Container.Name: true}
	if c.Container.Init {
		// Ordinary init containers aren't listed. One of them is waiting as long as none that comes after it has got
		// anything; sidecars that come before it have.
		for _, other := range slices.Backward(c.Pod.Containers) {
			if other.Name == c.Container.Name {
				break
			}
			telling[other.Name] = true
		}
	}
	for _, container := range pod.GetContainers() {
		if !telling[container.Name] {
			continue
		}
		for _, devices := range container.Devices {
			if corev1.ResourceName(devices.ResourceName) == protocol.ResourceMemory && len(devices.DeviceIds) > 0 {
				return holding
			}
		}
	}
	return waiting
}

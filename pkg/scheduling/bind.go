package scheduling

import (
	"context"
	"errors"
	"fmt"
	"net"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/binding"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// EventNotAssumed is the reason of the Event on a pod for which a bind found no card, see docs/events.md.
const EventNotAssumed = "GPUCardNotAssumed"

// errUnmanaged rejects pods that kube-scheduler binds without the extender. Otherwise a caller could bind any pod of
// the cluster with the extender's permissions.
var errUnmanaged = fmt.Errorf("%w: the pod asks for none of %s, %s, %s and %s; set them as managedResources of the extender in kube-scheduler's configuration",
	binding.ErrBadRequest, protocol.ResourceMemory, protocol.ResourceCount, protocol.ResourceCores, protocol.ResourceWholeCard)

// BindRequest is kube-scheduler's bind call.
type BindRequest struct {
	Namespace, Name string
	UID             types.UID
	Node            string
}

// Bind assumes cards of the node for the pod (usually one), and binds the pod in one write that carries the annotations. It succeeds
// for a pod that is already bound to this node, so retries are safe. A member of a gang first waits until its gang permits
// the bind. If ctx ends before the barrier opens, the bind is given up. After that the end of ctx has no effect: the bind
// runs until its own deadline, because a write is not undone if kube-scheduler disconnects.
func (s *Scheduler) Bind(ctx context.Context, request BindRequest) error {
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(request.Namespace, request.Name), "node", request.Node)
	s.requeue.BindStarted(gpu.PodUID(request.UID))
	result, err := s.bindPermitted(klog.NewContext(ctx, logger), request)
	s.Observer.BindFinished(result)
	if err != nil {
		logger.Info("Pod not bound", "result", result, "err", err)
	}
	return err
}

// bindPermitted binds the pod as soon as its gang permits it. A pod without a gang needs no permit.
func (s *Scheduler) bindPermitted(ctx context.Context, request BindRequest) (result reasons.Result, err error) {
	if request.Namespace == "" || request.Name == "" || request.UID == "" || request.Node == "" {
		return reasons.ResultBadRequest, fmt.Errorf("%w: PodNamespace, PodName, PodUID and Node are all needed", binding.ErrBadRequest)
	}
	if err := s.cache.Ready(); err != nil {
		return reasons.ResultNotReady, err
	}
	if pod, known := s.cachedPod(request); !known || pod.Node != "" || !s.groups.needsPermit(pod) {
		return s.bindClaimed(ctx, request, permit{deadline: s.Clock.Now().Add(s.BindTimeout)})
	}
	uid := gpu.PodUID(request.UID)
	permit, err := s.groups.await(ctx, uid, request.Node)
	switch {
	case errors.Is(err, binding.ErrNodeUnknown):
		return reasons.ResultUnreachable, err
	case err != nil:
		return reasons.ResultHeldBack, err
	}
	return s.bindClaimed(ctx, request, permit)
}

var errPanicked = errors.New("the bind panicked")

// bindClaimed claims the pod and binds it. For a member of a gang it retries failures that may be temporary, because the other members are being
// bound.
func (s *Scheduler) bindClaimed(ctx context.Context, request BindRequest, permit permit) (result reasons.Result, err error) {
	claim, ok := s.binder.Claim(gpu.PodUID(request.UID))
	if !ok {
		s.groups.inFlight(gpu.PodUID(request.UID), permit)
		return reasons.ResultInFlight, binding.ErrInFlight
	}
	err = errPanicked // The result if bind panics.
	defer func() { s.groups.end(claim, gpu.PodUID(request.UID), request.Node, permit, err) }()
	for {
		result, err = s.bind(ctx, claim, request, permit)
		if err == nil || permit.gang == nil || !temporary(result, err) || permit.deadline.Sub(s.Clock.Now()) <= 2*tickInterval {
			return result, err
		}
		<-s.Clock.After(tickInterval)
	}
}

// temporary reports whether the bind failed for a reason that may be temporary.
func temporary(result reasons.Result, err error) bool {
	var dial *net.OpError
	switch result {
	case reasons.ResultUnreachable, reasons.ResultUnconfirmed:
		return true
	case reasons.ResultRejected:
		return apierrors.IsTooManyRequests(err) || errors.As(err, &dial)
	}
	return false
}

// prepared is the result of a bind that can be written.
const prepared reasons.Result = ""

// bind makes one attempt until the permit's deadline. Whatever can have changed while the bind waited for others is checked after the wait.
func (s *Scheduler) bind(ctx context.Context, claim *binding.Claim, request BindRequest, permit permit) (reasons.Result, error) {
	ctx, cancel := s.withTimeout(context.WithoutCancel(ctx), permit.deadline.Sub(s.Clock.Now()))
	defer cancel()
	pod, allocation, result, err := s.prepareBind(ctx, claim, request, permit)
	// The binds of a gang's members arrive together.
	if result == prepared && permit.gang == nil && s.binder.Gather(ctx, s.cache.PendingFor(pod.UID)) {
		pod, allocation, result, err = s.prepareBind(ctx, claim, request, permit)
		if result != prepared && result != reasons.ResultBound { // The watch is about to report a bound pod, with this allocation or another.
			claim.Abandon()
		}
	}
	if result == prepared {
		result, err = claim.Write(ctx, request.Node, allocation, pod.Containers, permit.membership())
	}
	if result == reasons.ResultNoRoom {
		s.Recorder.Eventf(apiserver.Reference(pod.Pod), corev1.EventTypeWarning, EventNotAssumed, "No GPU card could be assumed: %v", err)
	}
	return result, err
}

// prepareBind returns the pod and its assumed allocation on the node, or the result of the bind if there is nothing to write.
func (s *Scheduler) prepareBind(ctx context.Context, claim *binding.Claim, request BindRequest, permit permit) (
	pod *clustercache.PodInfo, allocation ledger.Allocation, result reasons.Result, err error,
) {
	if pod, err = s.readPod(ctx, request); err != nil {
		if result = reasons.ResultUnreachable; errors.Is(err, binding.ErrBadRequest) {
			result = reasons.ResultBadRequest
		}
		return nil, allocation, result, err
	}
	if result, err = s.checkBind(pod, request.Node, permit); result != prepared {
		return pod, allocation, result, err
	}
	if err = s.binder.ConfirmNode(ctx, request.Node); err != nil {
		return pod, allocation, reasons.ResultUnreachable, err
	}
	if allocation, err = s.assumeCard(claim, pod.Pod, request.Node); err != nil {
		return pod, allocation, reasons.ResultNoRoom, err
	}
	return pod, allocation, prepared, nil
}

// checkBind returns the result of a bind that needs no write, or can't be made: the pod is bound, or its gang or its present request forbid it.
func (s *Scheduler) checkBind(pod *clustercache.PodInfo, node string, permit permit) (reasons.Result, error) {
	switch {
	case pod.Node == node:
		return reasons.ResultBound, nil
	case pod.Node != "":
		return reasons.ResultBadRequest, fmt.Errorf("%w: the pod is bound to node %s already", binding.ErrBadRequest, pod.Node)
	case s.groups.needsPermit(pod) && permit.gang == nil:
		return reasons.ResultHeldBack, reasons.GroupUnknown // The cache doesn't have the pod yet.
	case !pod.Managed:
		return reasons.ResultBadRequest, errUnmanaged
	case pod.RequestError != "":
		return reasons.ResultInvalidRequest, errors.New(pod.RequestError)
	}
	return prepared, nil
}

// assumeCard chooses cards of the node for the pod and assumes them in the ledger. A pod that asks for no GPU memory gets none. A pod that has an
// assumed allocation on the node keeps it if it can still be used.
func (s *Scheduler) assumeCard(claim *binding.Claim, pod gpu.Pod, node string) (ledger.Allocation, error) {
	if pod.Request == 0 {
		return ledger.Allocation{Pod: pod}, nil
	}
	now := s.Clock.Now()
	allocation, err := s.ledger.Reserve(node, pod, s.CardPolicy, now)
	if err != nil || allocation.State != ledger.Assumed {
		return allocation, err
	}
	usable := s.ledger.StillUsable(pod.UID)
	if usable && allocation.Demand() == pod.Demand() {
		return allocation, nil
	}
	// The place is from a group's plan or from fair sharing, or the bind has waited, and the place is outdated: what the pod asks for has
	// changed since, or its cards have failed, or they have more pods, because a new leader learns of the former leader's last binds there only now.
	noRoom := &ledger.NoRoomError{Node: node, Reason: reasons.Full}
	if claim.IsOpen() { // The earlier write may still take effect, with these cards.
		return ledger.Allocation{}, noRoom
	}
	request := ledger.Request{Pod: pod, Nodes: []string{node}, Binding: true}
	if _, ok := s.ledger.Move(request, s.view(), nil, now); !ok {
		if !usable { // An allocation that stays would limit the pod to this node.
			claim.Abandon()
		}
		return ledger.Allocation{}, noRoom
	}
	return s.ledger.Reserve(node, pod, s.CardPolicy, now)
}

// readPod returns the pod that the request names. It reads from the cache if the cache has the pod, otherwise from the API
// server: kube-scheduler's watch can be ahead.
func (s *Scheduler) readPod(ctx context.Context, request BindRequest) (*clustercache.PodInfo, error) {
	if pod, known := s.cachedPod(request); known {
		return pod, nil
	}
	return s.binder.ReadPod(ctx, gpu.Pod{Namespace: request.Namespace, Name: request.Name, UID: gpu.PodUID(request.UID)})
}

func (s *Scheduler) cachedPod(request BindRequest) (*clustercache.PodInfo, bool) {
	pod, known := s.cache.Pod(request.Namespace, request.Name)
	return pod, known && pod.UID == gpu.PodUID(request.UID)
}

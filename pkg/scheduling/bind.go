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

// pod returns what the call says of the pod.
func (r BindRequest) pod() gpu.Pod {
	return gpu.Pod{Namespace: r.Namespace, Name: r.Name, UID: gpu.PodUID(r.UID)}
}

// Bind assumes cards of the node for the pod (usually one), and binds the pod in one write that carries the annotations. It succeeds
// for a pod that is already bound to this node, so retries are safe. A member of a gang first waits until its gang permits
// the bind. If ctx ends before the barrier opens, the bind is given up. After that the end of ctx has no effect: the bind
// runs until its own deadline, because a write is not undone if kube-scheduler disconnects.
func (s *Scheduler) Bind(ctx context.Context, request BindRequest) error {
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(request.Namespace, request.Name), "node", request.Node)
	s.requeue.BindStarted(gpu.PodUID(request.UID))
	ctx = klog.NewContext(ctx, logger)
	permit, result, err := s.permitFor(ctx, request)
	if err == nil {
		result, err = s.bindClaimed(ctx, request, permit)
	}
	s.Observer.BindFinished(result)
	if err != nil {
		logger.Info("Pod not bound", "result", result, "err", err)
	}
	return err
}

// permitFor returns the permit for the bind as soon as the pod's gang grants it. A pod without a gang gets one at once. If there is none, permitFor
// returns why, and the bind's result.
func (s *Scheduler) permitFor(ctx context.Context, request BindRequest) (permit, reasons.Result, error) {
	if request.Namespace == "" || request.Name == "" || request.UID == "" || request.Node == "" {
		return permit{}, reasons.ResultBadRequest, fmt.Errorf("%w: PodNamespace, PodName, PodUID and Node are all needed", binding.ErrBadRequest)
	}
	if err := s.cache.Ready(); err != nil {
		return permit{}, reasons.ResultNotReady, err
	}
	if pod, known := s.cachedPod(request); !known || pod.Node != "" || s.groups.memberOf(pod) == nil {
		return permit{deadline: s.Clock.Now().Add(s.BindTimeout)}, "", nil
	}
	granted, err := s.groups.awaitPermit(ctx, gpu.PodUID(request.UID), request.Node)
	switch {
	case errors.Is(err, binding.ErrNodeUnknown):
		return permit{}, reasons.ResultUnreachable, err
	case err != nil:
		return permit{}, reasons.ResultHeldBack, err
	}
	return granted, "", nil
}

var errPanicked = errors.New("the bind panicked")

// bindClaimed claims the pod and tries to bind it. For a member of a gang it tries again after failures that may be temporary, because the other
// members are being bound.
func (s *Scheduler) bindClaimed(ctx context.Context, request BindRequest, permit permit) (result reasons.Result, err error) {
	claim, ok := s.binder.Claim(gpu.PodUID(request.UID))
	if !ok {
		s.groups.inFlight(gpu.PodUID(request.UID), permit)
		return reasons.ResultInFlight, binding.ErrInFlight
	}
	err = errPanicked // The result if the attempt panics.
	defer func() { s.groups.end(claim, gpu.PodUID(request.UID), request.Node, permit, err) }()
	for {
		result, err = s.tryBind(ctx, claim, request, permit)
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

// tryBind makes one attempt until the permit's deadline.
func (s *Scheduler) tryBind(ctx context.Context, claim *binding.Claim, request BindRequest, permit permit) (reasons.Result, error) {
	ctx, cancel := s.withTimeout(context.WithoutCancel(ctx), permit.deadline.Sub(s.Clock.Now()))
	defer cancel()
	prepared, result, err := s.prepareBind(ctx, claim, request, permit)
	// The binds of a gang's members arrive together.
	if prepared != nil && permit.gang == nil && s.binder.Gather(ctx, s.cache.PendingFor(gpu.PodUID(request.UID))) {
		prepared, result, err = s.prepareBind(ctx, claim, request, permit) // Everything can have changed during the wait.
		if err != nil {
			claim.Abandon()
		}
	}
	if prepared != nil {
		result, err = claim.Write(ctx, request.Node, prepared.allocation, prepared.pod.Containers, permit.membership())
	}
	if result == reasons.ResultNoRoom {
		s.Recorder.Eventf(apiserver.Reference(request.pod()), corev1.EventTypeWarning, EventNotAssumed, "No GPU card could be assumed: %v", err)
	}
	return result, err
}

// preparedBind is a bind that can be written: the pod, and its assumed allocation on the node.
type preparedBind struct {
	pod        *clustercache.PodInfo
	allocation ledger.Allocation
}

// prepareBind makes the checks, and assumes a card for the pod. It returns nil, and the result of the bind, if nothing is to be written: the pod is
// bound to the node already, or can't be bound to it. In the first case the watch is about to report the pod, with this allocation or another.
func (s *Scheduler) prepareBind(ctx context.Context, claim *binding.Claim, request BindRequest, permit permit) (*preparedBind, reasons.Result, error) {
	pod, err := s.readPod(ctx, request)
	switch {
	case errors.Is(err, binding.ErrBadRequest):
		return nil, reasons.ResultBadRequest, err
	case err != nil:
		return nil, reasons.ResultUnreachable, err
	case pod.Node == request.Node:
		return nil, reasons.ResultBound, nil
	}
	if result, err := s.checkBind(pod, permit); err != nil {
		return nil, result, err
	}
	if err := s.binder.ConfirmNode(ctx, request.Node); err != nil {
		return nil, reasons.ResultUnreachable, err
	}
	allocation, err := s.assumeCard(claim, pod.Pod, request.Node)
	if err != nil {
		return nil, reasons.ResultNoRoom, err
	}
	return &preparedBind{pod, allocation}, "", nil
}

// checkBind returns why the bind can't be made, with its result: the pod is bound to another node, or its gang or its present request forbid it.
func (s *Scheduler) checkBind(pod *clustercache.PodInfo, permit permit) (reasons.Result, error) {
	switch {
	case pod.Node != "":
		return reasons.ResultBadRequest, fmt.Errorf("%w: the pod is bound to node %s already", binding.ErrBadRequest, pod.Node)
	case s.groups.memberOf(pod) != nil && permit.gang == nil:
		return reasons.ResultHeldBack, reasons.GroupUnknown // The cache doesn't have the pod yet.
	case !pod.Managed:
		return reasons.ResultBadRequest, errUnmanaged
	case pod.RequestError != "":
		return reasons.ResultInvalidRequest, errors.New(pod.RequestError)
	}
	return "", nil
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
	if claim.HasOpenWrite() { // The earlier write may still take effect, with these cards.
		return ledger.Allocation{}, noRoom
	}
	request := ledger.Request{Pod: pod, Nodes: []string{node}, Binding: true}
	if _, ok := s.ledger.Move(request, s.view(), now); !ok {
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
	return s.binder.ReadPod(ctx, request.pod())
}

func (s *Scheduler) cachedPod(request BindRequest) (*clustercache.PodInfo, bool) {
	pod, known := s.cache.Pod(request.Namespace, request.Name)
	return pod, known && pod.UID == gpu.PodUID(request.UID)
}

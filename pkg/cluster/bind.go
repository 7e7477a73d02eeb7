package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// The results of a bind, as labels of metrics.
const (
	ResultBound      = "bound"
	ResultNoRoom     = "no_room"
	ResultNotReady   = "not_ready"
	ResultNotLeading = "not_leading"
	ResultBadRequest = "bad_request"
	// ResultUnreachable means that the pod or the pods of its node could not be read, or that no time was left for the
	// write. Nothing was written.
	ResultUnreachable = "unreachable"
	ResultRefused     = "refused"
	ResultUnknown     = "unknown"
	ResultInFlight    = "in_flight"
	// ResultHeldBack means that the pod's gang does not allow the bind yet.
	ResultHeldBack = "held_back"
)

// The Events on pods. Their reasons are stable; see docs/events.md.
const (
	EventAssumed    = "GPUCardAssumed"
	EventNotAssumed = "GPUCardNotAssumed"
)

// Errors of Bind that the caller distinguishes.
var (
	// ErrBadRequest means that the named pod cannot be bound to the named node by this request.
	ErrBadRequest = errors.New("bad bind request")
	// ErrInFlight means that another bind of the same pod has not ended.
	ErrInFlight = errors.New("a bind of this pod is in flight already")
	// ErrUnsettled means that the API server's answer was lost. The card stays assumed until the bind is resolved. A
	// retry is safe.
	ErrUnsettled = errors.New("whether the pod was bound is not known yet")
)

// errUnmanaged rejects pods that kube-scheduler binds without the extender. Otherwise a caller could bind any pod of
// the cluster with the extender's permissions.
var errUnmanaged = fmt.Errorf("%w: the pod asks for none of %s, %s and %s: kube-scheduler's configuration has to name them in the extender's managedResources",
	ErrBadRequest, protocol.ResourceMemory, protocol.ResourceCount, protocol.ResourceWholeCard)

// BindRequest is kube-scheduler's bind call.
type BindRequest struct {
	Namespace, Name string
	UID             types.UID
	Node            string
	// groupWhole is true if this bind completes the pod's gang, or if the gang is complete already.
	groupWhole bool
	// alone is true if the caller has not checked whether the pod is a member of a gang.
	alone bool
}

// Bind assumes a card of the node for the pod and binds the pod in one write that carries the annotations. It succeeds
// for a pod that is already bound to this node, so retries are safe. Only the values of ctx are used, not its end: a
// bind that has begun runs until its own deadline, because a write is not undone if the scheduler disconnects.
func (c *Cluster) Bind(ctx context.Context, request BindRequest) error {
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(request.Namespace, request.Name), "node", request.Node)
	c.attempts.forget(gpu.PodUID(request.UID))
	result, err := c.bindInTurn(klog.NewContext(ctx, logger), request)
	c.Observer.BindFinished(result)
	if err != nil {
		logger.Info("Pod not bound", "result", result, "err", err)
	}
	return err
}

// bindInTurn binds the pod as soon as its gang allows it. It binds a pod without a gang at once.
func (c *Cluster) bindInTurn(ctx context.Context, request BindRequest) (result string, err error) {
	if c.gangs == nil {
		return c.bind(ctx, request, c.BindTimeout)
	}
	return c.gangs.bind(ctx, request)
}

// bind makes one attempt within the timeout.
func (c *Cluster) bind(ctx context.Context, request BindRequest, timeout time.Duration) (result string, err error) {
	if request.Namespace == "" || request.Name == "" || request.UID == "" || request.Node == "" {
		return ResultBadRequest, fmt.Errorf("%w: PodNamespace, PodName, PodUID and Node are all needed", ErrBadRequest)
	}
	if err := c.Ready(); err != nil {
		return ResultNotReady, err
	}
	uid := gpu.PodUID(request.UID)
	if !c.flights.begin(uid) {
		return ResultInFlight, ErrInFlight
	}
	defer c.flights.end(uid)

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	defer cancel()

	pod, err := c.pod(ctx, request)
	switch {
	case errors.Is(err, ErrBadRequest):
		return ResultBadRequest, err
	case err != nil:
		return ResultUnreachable, err
	}
	if request.alone && protocol.InGroup(pod) {
		return ResultHeldBack, gang.Unknown
	}
	if !protocol.Managed(pod) {
		return ResultBadRequest, errUnmanaged
	}
	if pod.Spec.NodeName != "" {
		return c.alreadyBound(pod, request.Node)
	}
	if err := c.confirmNode(ctx, request.Node); err != nil {
		return ResultUnreachable, err
	}
	choice, err := c.reserve(pod, request.Node)
	if err != nil {
		c.Recorder.Eventf(reference(protocol.Pod(pod)), corev1.EventTypeWarning, EventNotAssumed,
			"No GPU card could be assumed: %v", err)
		return ResultNoRoom, err
	}
	return c.write(ctx, pod, request, choice)
}

// pod returns the pod that the request names. It reads from the informer if the informer has the pod, otherwise from
// the API server: kube-scheduler's watch can be ahead.
func (c *Cluster) pod(ctx context.Context, request BindRequest) (*corev1.Pod, error) {
	if pod, known := c.pods.get(request.Namespace, request.Name); known && pod.UID == request.UID {
		return pod, nil
	}
	return c.livePod(ctx, request)
}

// livePod reads the pod that the request names from the API server. It returns ErrBadRequest if there is none.
func (c *Cluster) livePod(ctx context.Context, request BindRequest) (*corev1.Pod, error) {
	pod, err := c.API.Pod(ctx, request.Namespace, request.Name)
	switch {
	case apierrors.IsNotFound(err):
		return nil, fmt.Errorf("%w: %w", ErrBadRequest, err)
	case err != nil:
		return nil, fmt.Errorf("reading the pod: %w", err)
	case pod.UID != request.UID:
		return nil, fmt.Errorf("%w: pod %s/%s has UID %s, not %s", ErrBadRequest, pod.Namespace, pod.Name, pod.UID, request.UID)
	}
	return pod, nil
}

func (c *Cluster) alreadyBound(pod *corev1.Pod, node string) (string, error) {
	if pod.Spec.NodeName != node {
		return ResultBadRequest, fmt.Errorf("%w: the pod is bound to node %s already", ErrBadRequest, pod.Spec.NodeName)
	}
	return ResultBound, nil
}

// choice is an allocation with the card and the unit that its annotations need.
type choice struct {
	ledger.Allocation
	card gpu.Card
	unit gpu.Unit
}

// reserve assumes a card for the pod. A pod that asks for no GPU memory gets none.
func (c *Cluster) reserve(pod *corev1.Pod, node string) (choice, error) {
	wanted := protocol.Pod(pod)
	if wanted.Request == 0 {
		return choice{Allocation: ledger.Allocation{Pod: wanted}}, nil
	}
	holder, err := c.ledger.Reserve(node, wanted, c.CardPolicy, c.Clock.Now())
	if err != nil {
		return choice{}, err
	}
	ch, ok := c.choice(node, holder)
	if !ok {
		// The node no longer has the card, or the pod is on the node without a card.
		c.settler.abandoned(holder.UID)
		return choice{}, &ledger.NoRoomError{Node: node, Reason: placement.Full}
	}
	return ch, nil
}

// choice adds the card to an allocation.
func (c *Cluster) choice(node string, holder ledger.Allocation) (choice, bool) {
	for _, share := range holder.Placement {
		if card, unit, ok := c.ledger.Card(node, share.Card); ok {
			return choice{holder, card, unit}, true
		}
	}
	return choice{}, false
}

func (ch choice) annotations() map[string]string {
	if ch.Request == 0 {
		return nil
	}
	return protocol.Assignment{
		Card: ch.card.Index, Request: ch.Request, CardMemory: ch.card.Memory, AssumeTime: ch.AssumeTime,
	}.Annotations()
}

// annotate adds the annotations that do not depend on the card.
func (r BindRequest) annotate(annotations map[string]string) map[string]string {
	if !r.groupWhole {
		return annotations
	}
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[protocol.AnnotationGroupWhole] = "true"
	return annotations
}

// write sends the Binding and updates the ledger with the outcome.
func (c *Cluster) write(ctx context.Context, pod *corev1.Pod, request BindRequest, ch choice) (string, error) {
	if !request.groupWhole { // The bind that completes a gang is not delayed: all other members wait for it.
		c.batch.wait(ctx)
	}
	if err := ctx.Err(); err != nil { // Nothing would be sent, and the answer would count as lost.
		c.settler.abandoned(ch.UID)
		return ResultUnreachable, fmt.Errorf("no time is left of --bind-timeout to write the Binding: %w", err)
	}
	// The last check before the write. If the process freezes between the check and the write, the node's Allocate
	// catches the late bind.
	if err := c.leading(); err != nil {
		c.settler.abandoned(ch.UID)
		return ResultNotLeading, err
	}
	// Before the write, so that the settler resolves the bind even if this function ends in an unexpected way.
	c.settler.begin(ch.Pod, request.Node)

	err := c.API.Bind(ctx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Annotations: request.annotate(ch.annotations()),
		},
		Target: corev1.ObjectReference{Kind: "Node", Name: request.Node},
	})
	c.Observer.APIWrite("binding")

	switch judge(err) {
	case done:
		return c.bound(ctx, request.Node, ch)
	case refused:
		c.settler.failed(ch.UID)
		return ResultRefused, fmt.Errorf("binding the pod: %w", err)
	}
	// This attempt or an earlier one may still have made the write: read the pod before answering.
	live, lookErr := c.livePod(ctx, request)
	switch {
	case lookErr == nil && live.Spec.NodeName == request.Node:
		c.settler.found(live)
		if found, ok := c.boundTo(ch.UID, request.Node); ok {
			ch = found // Another process may have bound the pod, to another card.
		}
		return c.bound(ctx, request.Node, ch)
	case judge(err) == conflict && lookErr == nil && live.Spec.NodeName != "":
		c.settler.failed(ch.UID)
		return ResultRefused, fmt.Errorf("%w: the pod is bound to node %s already", ErrBadRequest, live.Spec.NodeName)
	case judge(err) == conflict && (lookErr == nil || errors.Is(lookErr, ErrBadRequest)):
		c.settler.failed(ch.UID)
		return ResultRefused, fmt.Errorf("binding the pod: %w", err)
	}
	if !c.settler.lost(ch.UID) {
		// The watch has reported the pod meanwhile.
		if found, ok := c.boundTo(ch.UID, request.Node); ok {
			return c.bound(ctx, request.Node, found)
		}
	}
	return ResultUnknown, fmt.Errorf("%w: %w", ErrUnsettled, err)
}

// bound records that the write was made.
func (c *Cluster) bound(ctx context.Context, node string, ch choice) (string, error) {
	c.settler.committed(ch.UID)
	if ch.Request == 0 {
		return ResultBound, nil
	}
	c.assumed(klog.FromContext(ctx), node, ch)
	return ResultBound, nil
}

// boundLate reports the card of a pod whose unconfirmed bind turned out to have succeeded.
func (c *Cluster) boundLate(pod gpu.Pod, node string) {
	if ch, ok := c.boundTo(pod.UID, node); ok {
		c.assumed(klog.Background().WithValues("pod", klog.KRef(pod.Namespace, pod.Name), "node", node), node, ch)
	}
}

// boundTo returns the allocation of a pod that is bound to the node.
func (c *Cluster) boundTo(uid gpu.PodUID, node string) (choice, bool) {
	home, holder, ok := c.ledger.Lookup(uid)
	if !ok || home != node || holder.State != ledger.Bound {
		return choice{}, false
	}
	return c.choice(node, holder)
}

// The limits of the Events that name a pod's card: on most days each pod gets its Event. If many pods are bound, only
// the first ones and then a few per second get one.
const (
	assumedEventsBurst  = 50
	assumedEventsSecond = 2
)

// assumed reports the pod's card in the log and in an Event, once for each pod that this process has bound. While many
// pods are bound, at once or continuously, Events are left out: an Event is one more write per bind, costs as much as
// the bind itself, and repeats the pod's annotations.
func (c *Cluster) assumed(logger klog.Logger, node string, ch choice) {
	logger.Info("Pod bound", "card", ch.card.Index, "memory", ch.unit.Format(ch.Request))
	if !c.assumedEvents.AllowN(c.Clock.Now(), 1) {
		return
	}
	c.Recorder.Eventf(reference(ch.Pod), corev1.EventTypeNormal, EventAssumed, "Assumed GPU card %d of node %s: %s of its %s",
		ch.card.Index, node, ch.unit.Format(ch.Request), ch.unit.Format(ch.card.Memory))
}

// reference returns the object reference of a pod for Events.
func reference(pod gpu.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID),
	}
}

// flights are the pods with a bind call in progress. Each pod has at most one, so that an attempt does not take the
// outcome of another for its own.
type flights struct {
	mu   sync.Mutex
	pods map[gpu.PodUID]struct{}
}

func (f *flights) begin(uid gpu.PodUID) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, flying := f.pods[uid]; flying {
		return false
	}
	if f.pods == nil {
		f.pods = map[gpu.PodUID]struct{}{}
	}
	f.pods[uid] = struct{}{}
	return true
}

func (f *flights) end(uid gpu.PodUID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.pods, uid)
}

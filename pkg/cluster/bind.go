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

// The results of a bind, as metrics label them.
const (
	ResultBound      = "bound"
	ResultNoRoom     = "no_room"
	ResultNotReady   = "not_ready"
	ResultNotLeading = "not_leading"
	ResultBadRequest = "bad_request"
	// ResultUnreachable: the pod couldn't be read, or the time was over before the write; nothing was written.
	ResultUnreachable = "unreachable"
	ResultRefused     = "refused"
	ResultUnknown     = "unknown"
	ResultInFlight    = "in_flight"
	// ResultHeldBack: the pod's group doesn't let it go.
	ResultHeldBack = "held_back"
)

// The Events on pods. Reasons are constant; see docs/events.md.
const (
	EventAssumed    = "GPUCardAssumed"
	EventNotAssumed = "GPUCardNotAssumed"
)

// Errors of Bind that say who is to blame.
var (
	// ErrBadRequest: the request names a pod or node that can't be bound so.
	ErrBadRequest = errors.New("bad bind request")
	// ErrInFlight: another bind of the same pod hasn't ended.
	ErrInFlight = errors.New("a bind of this pod is in flight already")
	// ErrUnsettled: the answer of the API server was lost. The card stays reserved until it is known what became of
	// the pod; trying again is safe.
	ErrUnsettled = errors.New("whether the pod was bound is not known yet")
)

// errUnmanaged refuses pods that kube-scheduler binds by itself. Were they bound here, a caller could bind any pod of the
// cluster with the extender's rights.
var errUnmanaged = fmt.Errorf("%w: the pod asks for none of %s, %s and %s: kube-scheduler's configuration has to name them in the extender's managedResources",
	ErrBadRequest, protocol.ResourceMemory, protocol.ResourceCount, protocol.ResourceWholeCard)

// BindRequest is what kube-scheduler sends.
type BindRequest struct {
	Namespace, Name string
	UID             types.UID
	Node            string
	// groupWhole says that the pod is bound as the last of its group, or after it.
	groupWhole bool
	// alone says that nobody has looked whether the pod is a member of a group.
	alone bool
}

// Bind reserves a card of the node for the pod and binds it in one write that carries the annotations. Binding a pod
// that is bound to this node already is a success, so retries are safe. ctx carries values only: a bind that has begun
// runs to its own deadline, since the scheduler's going away doesn't undo a write.
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

// bindInTurn binds the pod once its group lets it go; a pod without a group at once.
func (c *Cluster) bindInTurn(ctx context.Context, request BindRequest) (result string, err error) {
	if c.gangs == nil {
		return c.bind(ctx, request, c.BindTimeout)
	}
	return c.gangs.bind(ctx, request)
}

// bind makes one attempt, within the given time.
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

// pod returns the pod that the request names: from the informer where it knows it, else from the API server, which
// kube-scheduler may be ahead of us in watching.
func (c *Cluster) pod(ctx context.Context, request BindRequest) (*corev1.Pod, error) {
	if pod, known := c.pods.get(request.Namespace, request.Name); known && pod.UID == request.UID {
		return pod, nil
	}
	return c.livePod(ctx, request)
}

// livePod returns the pod that the request names as the API server has it now. ErrBadRequest says that there is none.
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

// choice is a reservation with what its annotations tell of the card.
type choice struct {
	ledger.Allocation
	card gpu.Card
	unit gpu.Unit
}

// reserve chooses the card. A pod that asks for no GPU memory needs none.
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
		// The card vanished, or the pod came to the node without one.
		c.settler.abandoned(holder.UID)
		return choice{}, &ledger.NoRoomError{Node: node, Reason: placement.Full}
	}
	return ch, nil
}

// choice joins a holder with its card.
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

// annotate adds what the pod is to carry beside the card.
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

// write makes the one write, and brings the ledger to what became of it.
func (c *Cluster) write(ctx context.Context, pod *corev1.Pod, request BindRequest, ch choice) (string, error) {
	if !request.groupWhole { // Whom all other members wait for.
		c.batch.wait(ctx)
	}
	if err := ctx.Err(); err != nil { // Nothing would be sent, and its answer be taken for lost.
		c.settler.abandoned(ch.UID)
		return ResultUnreachable, fmt.Errorf("no time is left of --bind-timeout to write the Binding: %w", err)
	}
	// The last look: what a process that freezes between here and its write could do is caught at the node's Allocate.
	if err := c.leading(); err != nil {
		c.settler.abandoned(ch.UID)
		return ResultNotLeading, err
	}
	// Before the write: should this end in a way that nobody foresaw, the settler finds out what became of the pod.
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
	// The write may have been made all the same, by this attempt or an earlier one: look before saying anything.
	live, lookErr := c.livePod(ctx, request)
	switch {
	case lookErr == nil && live.Spec.NodeName == request.Node:
		c.settler.found(live)
		if found, ok := c.boundTo(ch.UID, request.Node); ok {
			ch = found // Whoever bound it may have chosen another card.
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
		// The watch has told meanwhile.
		if found, ok := c.boundTo(ch.UID, request.Node); ok {
			return c.bound(ctx, request.Node, found)
		}
	}
	return ResultUnknown, fmt.Errorf("%w: %w", ErrUnsettled, err)
}

// bound says that the pod has its card.
func (c *Cluster) bound(ctx context.Context, node string, ch choice) (string, error) {
	c.settler.committed(ch.UID)
	if ch.Request == 0 {
		return ResultBound, nil
	}
	c.assumed(klog.FromContext(ctx), node, ch)
	return ResultBound, nil
}

// boundLate says that a pod has its card whose bind's answer was lost.
func (c *Cluster) boundLate(pod gpu.Pod, node string) {
	if ch, ok := c.boundTo(pod.UID, node); ok {
		c.assumed(klog.Background().WithValues("pod", klog.KRef(pod.Namespace, pod.Name), "node", node), node, ch)
	}
}

// boundTo returns what a pod holds that is bound to the node.
func (c *Cluster) boundTo(uid gpu.PodUID, node string) (choice, bool) {
	home, holder, ok := c.ledger.Lookup(uid)
	if !ok || home != node || holder.State != ledger.Bound {
		return choice{}, false
	}
	return c.choice(node, holder)
}

// The Events that name a pod's card: all of them on most days; of a storm the first ones, and a few a second.
const (
	assumedEventsBurst  = 50
	assumedEventsSecond = 2
)

// assumed tells of the card that a pod was given, once for each pod that this process has bound. The Event is left out
// where many pods are bound, at once or on and on: it is a write for each bind, as dear as the bind itself, and says what
// the pod's annotations say.
func (c *Cluster) assumed(logger klog.Logger, node string, ch choice) {
	logger.Info("Pod bound", "card", ch.card.Index, "memory", ch.unit.Format(ch.Request))
	if !c.assumedEvents.AllowN(c.Clock.Now(), 1) {
		return
	}
	c.Recorder.Eventf(reference(ch.Pod), corev1.EventTypeNormal, EventAssumed, "Assumed GPU card %d of node %s: %s of its %s",
		ch.card.Index, node, ch.unit.Format(ch.Request), ch.unit.Format(ch.card.Memory))
}

// reference is what Events are about.
func reference(pod gpu.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID),
	}
}

// flights are the pods with a bind in flight: one at a time for each, so that two attempts can't take each other's
// outcome for their own.
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

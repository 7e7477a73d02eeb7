package cluster

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// GangOptions configure gangs: groups of pods that are bound all together or not at all.
type GangOptions struct {
	// Hold is how long a member's bind call is held at most; 0 disables gangs. The sum of Hold and BindTimeout must be
	// less than kube-scheduler's httpTimeout.
	Hold time.Duration
	// Patience is how long a plan's reservations last while members are missing, and how long a gang may stay partial.
	Patience time.Duration
	// ClaimAfter is how long a gang waits before freed memory is reserved for it; 0 disables starvation reservations.
	ClaimAfter time.Duration
	// OnFailure is what happens to the bound members of a gang that is still partial after Patience.
	OnFailure gang.FailurePolicy
	// Observer receives the events of gangs, for metrics.
	Observer gang.Observer
	// Answering returns why this process no longer answers kube-scheduler, or nil if it does. If it doesn't, no further
	// members arrive, and held binds would only delay the processes that wait for them. It is nil if there is only one
	// extender.
	Answering func() error
}

const (
	// gangInterval is the interval between two calls of Tick.
	gangInterval = 100 * time.Millisecond
	// retryInterval is the pause between attempts to bind a member whose barrier has opened.
	retryInterval = 100 * time.Millisecond
	// deletedDelay is how long the rejection of held binds is delayed after a member of the gang was deleted.
	// kube-scheduler may have deleted the member itself, as a victim of a preemptor. It retries the preemptor when the
	// members with rejected binds leave its cache. But it skips the preemptor as long as its own watch hasn't reported
	// the deletion, and then the preemptor waits for minutes (k8s.io/kubernetes
	// pkg/scheduler/framework/preemption/executor.go, isRunningPreemption).
	deletedDelay = time.Second
	// maxEvictions limits the concurrent eviction calls.
	maxEvictions = 16
)

// gangs connects a gang.Manager to the cluster: it passes in the events and the time, and performs the Effects. A nil
// gangs means that gangs are disabled.
type gangs struct {
	*Cluster
	book *gang.Manager
	// evictions receives the pods to evict. While one batch is in progress the next one is dropped, because the manager
	// requests it again.
	evictions chan []gpu.Pod
}

func newGangs(c *Cluster) *gangs {
	if c.Gangs.Hold <= 0 {
		return nil
	}
	return &gangs{
		Cluster: c, evictions: make(chan []gpu.Pod),
		book: gang.New(gang.Options{
			Ledger: c.ledger, Release: c.settler.abandoned, View: ledger.View{Card: c.CardPolicy, Node: c.NodePolicy},
			Hold: c.Gangs.Hold, Patience: c.Gangs.Patience, StarvationAfter: c.Gangs.ClaimAfter, OnFailure: c.Gangs.OnFailure, Observer: c.Gangs.Observer,
			EligibleNodes: c.reach,
		}),
	}
}

// FilterGang answers a filter call for a member of a gang. decided is false if the pod is to be placed like any single
// pod. The caller must not change offered afterwards.
func (c *Cluster) FilterGang(pod *corev1.Pod, offered []string) (answer gang.FilterResult, decided bool) {
	if c.gangs == nil || !protocol.InGroup(pod) {
		return gang.FilterResult{}, false
	}
	if c.Ready() != nil {
		return gang.FilterResult{Reason: gang.Unknown}, true // The pending pods are requeued after the cache sync.
	}
	answer = c.gangs.book.Filter(gpu.PodUID(pod.UID), offered, c.Clock.Now())
	c.gangs.act()
	if !answer.AsSingle {
		c.waker.forget(gpu.PodUID(pod.UID)) // The manager requeues the pod.
	}
	return answer, !answer.AsSingle
}

// GangStates returns the number of gangs in each state, for metrics.
func (c *Cluster) GangStates() map[string]int {
	if c.gangs == nil {
		return nil
	}
	return c.gangs.book.States()
}

// freed is the ledger's callback for freed memory of the node.
func (c *Cluster) freed(node string) {
	c.waker.freed(node)
	if c.gangs != nil {
		c.gangs.book.MemoryFreed()
	}
}

func (c *Cluster) anyNode() string {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil || len(nodes) == 0 {
		return ""
	}
	return nodes[0].Name
}

// countNodes returns the number of the cluster's nodes, with and without cards.
func (c *Cluster) countNodes() int {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return 0
	}
	return len(nodes)
}

// bind holds a member's bind call until its gang's permit is decided. A pod without a gang is bound at once.
func (g *gangs) bind(ctx context.Context, request BindRequest) (result string, err error) {
	if err := g.Ready(); err != nil {
		return ResultNotReady, err
	}
	pod, known := g.pods.get(request.Namespace, request.Name)
	switch {
	case !known || pod.UID != request.UID:
		request.alone = true // The watch lags, or the pod doesn't exist: the live read of the pod will show which.
		return g.Cluster.bind(ctx, request, g.BindTimeout)
	case !protocol.InGroup(pod):
		return g.Cluster.bind(ctx, request, g.BindTimeout) // It doesn't even need the manager's lock.
	case pod.Spec.NodeName != "":
		return g.alreadyBound(pod, request.Node)
	}
	uid := gpu.PodUID(request.UID)
	key, member := g.book.GangOf(uid)
	if !member {
		return ResultHeldBack, gang.Unknown
	}
	ticket, why := g.book.RequestPermit(uid, request.Node, g.Clock.Now())
	g.act()
	if why != nil {
		return ResultHeldBack, *why
	}
	select {
	case <-ticket.Decided:
	case <-ctx.Done():
		if g.book.CancelPermit(uid, ticket) {
			return ResultHeldBack, fmt.Errorf("kube-scheduler gave the call up: %w", ctx.Err())
		}
		<-ticket.Decided // The barrier is open: the decision follows within the BindTimeout of the other members.
	}
	if why := ticket.Rejection(); why != nil {
		if *why == gang.Deleted {
			<-g.Clock.After(min(deletedDelay, g.BindTimeout))
		}
		return ResultHeldBack, *why
	}
	request.groupWhole = ticket.MarkWhole()
	err = errPanicked // It stays so if bindAtLast panics.
	defer func() {
		if err != nil && !errors.Is(err, ErrUnsettled) && !errors.Is(err, ErrInFlight) {
			g.settler.abandoned(uid) // This releases the plan's reservation.
		}
		g.book.BindDone(key, uid, request.Node, err == nil, request.groupWhole, g.Clock.Now())
		g.act()
	}()
	result, err = g.bindAtLast(ctx, request, ticket.OpenedAt().Add(g.BindTimeout))
	return result, err
}

var errPanicked = errors.New("the bind panicked")

// bindAtLast binds a member whose permit was granted. It retries failures that may be temporary, because the other
// members are being bound.
func (g *gangs) bindAtLast(ctx context.Context, request BindRequest, deadline time.Time) (result string, err error) {
	for {
		result, err = g.Cluster.bind(ctx, request, deadline.Sub(g.Clock.Now()))
		if err == nil || !passing(result, err) || deadline.Sub(g.Clock.Now()) <= 2*retryInterval {
			return result, err
		}
		<-g.Clock.After(retryInterval)
	}
}

// passing reports whether the bind failed for a reason that may be temporary.
func passing(result string, err error) bool {
	var dial *net.OpError
	switch result {
	case ResultUnreachable, ResultUnknown:
		return true
	case ResultRefused:
		return apierrors.IsTooManyRequests(err) || errors.As(err, &dial)
	}
	return false
}

// waits reports whether the pod is a member of a gang that isn't whole.
func (g *gangs) waits(pod *corev1.Pod) bool {
	return g != nil && protocol.InGroup(pod) && g.book.InPendingGang(gpu.PodUID(pod.UID))
}

// seen passes the state of a pod to the manager.
func (g *gangs) seen(pod *corev1.Pod) {
	if g == nil || !protocol.InGroup(pod) {
		return
	}
	g.book.SetMember(memberOf(pod), g.Clock.Now())
}

// changed removes the old pod from the manager if another pod now has its name, or if the pod no longer names a group.
func (g *gangs) changed(old *packed, pod *corev1.Pod) {
	if g != nil && protocol.InGroup(&corev1.Pod{ObjectMeta: old.meta()}) && (old.UID != pod.UID || !protocol.InGroup(pod)) {
		g.book.RemoveMember(gpu.PodUID(old.UID), g.Clock.Now())
	}
}

// gone removes the pod from the manager.
func (g *gangs) gone(pod *corev1.Pod) {
	if g != nil && protocol.InGroup(pod) {
		g.book.RemoveMember(gpu.PodUID(pod.UID), g.Clock.Now())
	}
}

// run calls the manager's Tick until ctx ends, and starts and stops leading with the term.
func (g *gangs) run(ctx context.Context) error {
	ticker := g.Clock.NewTicker(gangInterval)
	defer ticker.Stop()
	leads := false
	for {
		select {
		case <-ctx.Done():
			g.book.StopLeading(g.Clock.Now())
			return nil
		case <-ticker.C():
		}
		now := g.Clock.Now()
		switch {
		case g.leading() != nil || g.Gangs.Answering != nil && g.Gangs.Answering() != nil:
			g.book.StopLeading(now)
			leads = false
		case g.Ready() == nil:
			if !leads {
				g.book.StartLeading()
			}
			g.book.Tick(now)
			leads = true
		}
		g.act()
	}
}

// act performs the manager's Effects, if this process is the leader.
func (g *gangs) act() {
	effects := g.book.TakeEffects()
	if g.leading() != nil {
		return // The leader has the same effects.
	}
	if effects.Requeue {
		g.waker.call(effects.RequeueNode)
	}
	if len(effects.WholePriorities) > 0 && g.waker.outranks(slices.Min(effects.WholePriorities)) {
		g.waker.call("")
	}
	for _, notice := range effects.Events {
		kind := corev1.EventTypeNormal
		if notice.Warning {
			kind = corev1.EventTypeWarning
		}
		g.Recorder.Event(gangReference(notice.Pod), kind, notice.Reason, notice.Text)
	}
	if len(effects.Evict) > 0 {
		select {
		case g.evictions <- effects.Evict:
		default:
		}
	}
}

// evict makes the eviction calls until ctx ends.
func (g *gangs) evict(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case pods := <-g.evictions:
			group := new(errgroup.Group)
			group.SetLimit(maxEvictions)
			for _, pod := range pods {
				group.Go(func() error { g.evictPod(ctx, pod); return nil })
			}
			_ = group.Wait() // evictPod logs its errors.
		}
	}
}

// evictPod makes one eviction call. Disruption budgets are respected: the manager requests the eviction again until it
// is allowed.
func (g *gangs) evictPod(ctx context.Context, pod gpu.Pod) {
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(pod.Namespace, pod.Name))
	if g.leading() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, evictTimeout)
	defer cancel()
	err := g.API.Evict(ctx, pod, false)
	g.Observer.APIWrite("eviction")
	switch {
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return // The pod is gone without an eviction.
	case err != nil:
		logger.Info("A member of a group that is bound in part is not evicted yet", "err", err)
		return
	}
	logger.Info("Evicted, since the pod's group was bound in part and did not become whole")
	g.Gangs.Observer.GangEvicted()
	g.Recorder.Event(gangReference(pod), corev1.EventTypeWarning, gang.EventEvicted,
		"Evicted: the pod's group was bound in part, and its other members could not be bound in time")
}

func gangReference(pod gpu.Pod) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID),
	}
}

// The keys that keepGroup adds to the annotations of a slim pod. They are not valid as annotation keys, so no
// annotation of a real pod can have them.
const (
	noteTemplate = "slim: template"
	noteCardless = "slim: asks for no cards"
	noteBoundAt  = "slim: bound at"
)

// keepGroup copies to slim the fields that memberOf reads, if the pod names a group.
func keepGroup(slim, pod *corev1.Pod) {
	if !protocol.InGroup(pod) {
		return
	}
	slim.CreationTimestamp = pod.CreationTimestamp
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		slim.OwnerReferences = []metav1.OwnerReference{{UID: owner.UID}}
	}
	if len(pod.Spec.SchedulingGates) > 0 {
		slim.Spec.SchedulingGates = []corev1.PodSchedulingGate{{}}
	}
	if slim.Labels == nil {
		slim.Labels = only(pod.Labels, protocol.LabelGroupName, protocol.LabelGroupSize)
	}
	notes := map[string]string{noteTemplate: protocol.TemplateHash(pod)}
	maps.Copy(notes, only(pod.Annotations, protocol.AnnotationGroupName, protocol.AnnotationGroupSize, protocol.AnnotationGroupWhole))
	if !protocol.RequestsCards(pod) {
		notes[noteCardless] = ""
	}
	for i := range pod.Status.Conditions {
		// The API server sets the condition together with the node (k8s.io/kubernetes
		// pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata).
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodScheduled && c.Status == corev1.ConditionTrue && pod.Spec.NodeName != "" {
			notes[noteBoundAt] = c.LastTransitionTime.UTC().Format(time.RFC3339)
		}
	}
	maps.Copy(notes, slim.Annotations)
	slim.Annotations = notes
}

// memberOf returns the gang member that a slim pod describes. The pod must name a group.
func memberOf(pod *corev1.Pod) gang.Member {
	group, err := protocol.GroupOf(pod)
	_, cardless := pod.Annotations[noteCardless]
	m := gang.Member{
		Pod: protocol.Pod(pod), Gang: gang.Key{Namespace: pod.Namespace, Name: group.Name}, Size: group.Size,
		Created: pod.CreationTimestamp.Time, Template: pod.Annotations[noteTemplate],
		Node: pod.Spec.NodeName, MarkedWhole: pod.Annotations[protocol.AnnotationGroupWhole] == "true", Ended: protocol.Terminal(pod), Succeeded: pod.Status.Phase == corev1.PodSucceeded,
		Gated: len(pod.Spec.SchedulingGates) > 0, Cardless: cardless,
	}
	if at, err := time.Parse(time.RFC3339, pod.Annotations[noteBoundAt]); err == nil {
		m.BoundAt = at
	}
	if err != nil {
		m.Problem, m.Size = err.Error(), 0
	}
	if len(pod.OwnerReferences) > 0 {
		m.Controller = string(pod.OwnerReferences[0].UID)
	}
	return m
}

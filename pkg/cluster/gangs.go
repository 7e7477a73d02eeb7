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

// GangOptions say how groups of pods are treated of which all run or none.
type GangOptions struct {
	// Hold is how long a member's bind is held at most; 0 leaves groups alone. Hold and BindTimeout together must lie
	// below kube-scheduler's httpTimeout.
	Hold time.Duration
	// Patience is how long places are kept for members to come, and how long a group may be bound in part.
	Patience time.Duration
	// ClaimAfter is how long a group waits before memory that comes free is kept for it; 0 never does so.
	ClaimAfter time.Duration
	// OnFailure says what becomes of the members that run when that time is over.
	OnFailure gang.FailurePolicy
	// Observer is told what happens.
	Observer gang.Observer
	// Answering returns why kube-scheduler isn't answered any more, or nil: then nobody new comes, and binds that are held
	// would only hold up whoever waits for them. Nil for the only extender.
	Answering func() error
}

const (
	// gangInterval is how often time passes for groups.
	gangInterval = 100 * time.Millisecond
	// retryInterval is the pause between attempts to bind a member whose group is being bound.
	retryInterval = 100 * time.Millisecond
	// deletedDelay is how long the answer waits that ends the holds of a group of which a member was deleted. kube-scheduler may
	// have done that itself, for another pod: it looks at that one again when the places of those that were held come free in
	// its cache, but passes that over while its own watch hasn't told of the deletion, and then waits for minutes
	// (pkg/scheduler/framework/preemption/executor.go, isRunningPreemption).
	deletedDelay = time.Second
	// maxEvictions is how many evictions are asked for at once.
	maxEvictions = 16
)

// gangs are the hands of a gang.Manager: they tell it what happens, and do what it wants done. A nil gangs leaves groups
// alone.
type gangs struct {
	*Cluster
	book *gang.Manager
	// evictions are pods to evict; while one batch is under way the next is dropped, since the Book repeats itself.
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

// FilterGang answers for a member of a group that isn't placed like any pod: then decided is true. offered must not be
// changed afterwards.
func (c *Cluster) FilterGang(pod *corev1.Pod, offered []string) (answer gang.FilterResult, decided bool) {
	if c.gangs == nil || !protocol.InGroup(pod) {
		return gang.FilterResult{}, false
	}
	if c.Ready() != nil {
		return gang.FilterResult{Reason: gang.Unknown}, true // Once every pod is known, those that wait are called.
	}
	answer = c.gangs.book.Filter(gpu.PodUID(pod.UID), offered, c.Clock.Now())
	c.gangs.act()
	if !answer.AsSingle {
		c.waker.forget(gpu.PodUID(pod.UID)) // Waking it is the Book's business.
	}
	return answer, !answer.AsSingle
}

// GangStates counts the groups by state, for metrics.
func (c *Cluster) GangStates() map[string]int {
	if c.gangs == nil {
		return nil
	}
	return c.gangs.book.States()
}

// freed is told by the ledger that memory of the node came free.
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

// countNodes returns the number of nodes of the cluster, with and without cards.
func (c *Cluster) countNodes() int {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return 0
	}
	return len(nodes)
}

// bind holds a member's bind until its group lets it go. A pod without a group is bound at once.
func (g *gangs) bind(ctx context.Context, request BindRequest) (result string, err error) {
	if err := g.Ready(); err != nil {
		return ResultNotReady, err
	}
	pod, known := g.pods.get(request.Namespace, request.Name)
	switch {
	case !known || pod.UID != request.UID:
		request.alone = true // The watch is behind, or the request names nobody: that shows once the pod has been read.
		return g.Cluster.bind(ctx, request, g.BindTimeout)
	case !protocol.InGroup(pod):
		return g.Cluster.bind(ctx, request, g.BindTimeout) // They don't even wait for the Book's lock.
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
		<-ticket.Decided // The others are being bound: that ends within their timeout.
	}
	if why := ticket.Rejection(); why != nil {
		if *why == gang.Deleted {
			<-g.Clock.After(min(deletedDelay, g.BindTimeout))
		}
		return ResultHeldBack, *why
	}
	request.groupWhole = ticket.MarkWhole()
	err = errPanicked // Unless bindAtLast returns.
	defer func() {
		if err != nil && !errors.Is(err, ErrUnsettled) && !errors.Is(err, ErrInFlight) {
			g.settler.abandoned(uid) // What the plan had reserved.
		}
		g.book.BindDone(key, uid, request.Node, err == nil, request.groupWhole, g.Clock.Now())
		g.act()
	}()
	result, err = g.bindAtLast(ctx, request, ticket.OpenedAt().Add(g.BindTimeout))
	return result, err
}

var errPanicked = errors.New("the bind panicked")

// bindAtLast binds a member whose group has been let go: the others are being bound, so what may pass is tried again.
func (g *gangs) bindAtLast(ctx context.Context, request BindRequest, deadline time.Time) (result string, err error) {
	for {
		result, err = g.Cluster.bind(ctx, request, deadline.Sub(g.Clock.Now()))
		if err == nil || !passing(result, err) || deadline.Sub(g.Clock.Now()) <= 2*retryInterval {
			return result, err
		}
		<-g.Clock.After(retryInterval)
	}
}

// passing says whether the bind failed for something that may be over in a moment.
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

// waits says whether the pod is a member of a group that isn't whole.
func (g *gangs) waits(pod *corev1.Pod) bool {
	return g != nil && protocol.InGroup(pod) && g.book.InPendingGang(gpu.PodUID(pod.UID))
}

// seen tells the Book how a pod stands.
func (g *gangs) seen(pod *corev1.Pod) {
	if g == nil || !protocol.InGroup(pod) {
		return
	}
	g.book.SetMember(memberOf(pod), g.Clock.Now())
}

// changed tells the Book of a pod that isn't what it was: another one of its name, or one without its group.
func (g *gangs) changed(old *packed, pod *corev1.Pod) {
	if g != nil && protocol.InGroup(&corev1.Pod{ObjectMeta: old.meta()}) && (old.UID != pod.UID || !protocol.InGroup(pod)) {
		g.book.RemoveMember(gpu.PodUID(old.UID), g.Clock.Now())
	}
}

// gone tells the Book that a pod is no more.
func (g *gangs) gone(pod *corev1.Pod) {
	if g != nil && protocol.InGroup(pod) {
		g.book.RemoveMember(gpu.PodUID(pod.UID), g.Clock.Now())
	}
}

// run lets time pass for the Book until ctx ends.
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

// act does what the Book wants done.
func (g *gangs) act() {
	effects := g.book.TakeEffects()
	if g.leading() != nil {
		return // Whoever leads will find the same.
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

// evict asks for evictions until ctx ends.
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
			_ = group.Wait() // Each has said what went wrong.
		}
	}
}

// evictPod asks for one eviction. Disruption budgets are respected: the Book asks again until it is allowed.
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
		return // It has gone by itself.
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

// What keepGroup notes in a slim pod. No annotation of a real pod can be named so: they are no valid keys.
const (
	noteTemplate = "slim: template"
	noteCardless = "slim: asks for no cards"
	noteBoundAt  = "slim: bound at"
)

// keepGroup keeps in a slim pod what memberOf reads of it, where the pod speaks of a group.
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
		// The API server sets it with the node (pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata).
		if c := &pod.Status.Conditions[i]; c.Type == corev1.PodScheduled && c.Status == corev1.ConditionTrue && pod.Spec.NodeName != "" {
			notes[noteBoundAt] = c.LastTransitionTime.UTC().Format(time.RFC3339)
		}
	}
	maps.Copy(notes, slim.Annotations)
	slim.Annotations = notes
}

// memberOf reads a slim pod that speaks of a group.
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

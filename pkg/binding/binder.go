// Package binding writes Bindings and keeps the ledger in step with their outcomes.
//
// An allocation that isn't bound is released only while no other bind can write it: each bind claims its pod before it reads the allocation
// (claim.go). So a pod has at most one bind in flight. While pods queue, binds are sent together (batch.go). Each write is open from its begin
// until it is rejected or the watch reports the pod (tracker.go); a bind whose answer was lost is unconfirmed until a live read or the watch
// resolves it (resolve.go). Until its watch has caught up, a new leader lists the pods of a node from the API server before its first bind there
// (term.go). What live reads show reaches the ledger and the listeners (read.go).
package binding

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// EventAssumed is the reason of the Event that names a pod's card, see docs/events.md.
const EventAssumed = "GPUCardAssumed"

// Errors that callers distinguish.
var (
	// ErrBadRequest means that the named pod cannot be bound to the named node by this request.
	ErrBadRequest = errors.New("bad bind request")
	// ErrInFlight means that another bind of the same pod has not ended.
	ErrInFlight = errors.New("a bind of this pod is in flight already")
	// ErrUnconfirmed means that the API server's answer was lost. The card stays assumed until the bind is resolved. A
	// retry is safe.
	ErrUnconfirmed = errors.New("whether the pod was bound is not known yet")
	// ErrNodeUnknown means that the pods of the node could not be listed, see ConfirmNode.
	ErrNodeUnknown = errors.New("the node's pods could not be listed")
)

// API is the part of package apiserver that a Binder uses.
type API interface {
	Bind(ctx context.Context, binding *corev1.Binding) error
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	PodsOn(ctx context.Context, node string) ([]corev1.Pod, error)
}

// Observer receives what metrics count. Its methods must return at once.
type Observer interface {
	// BindResolved reports the outcome of an unconfirmed bind, one of reasons.ResolveResults.
	BindResolved(outcome reasons.Result)
	// APIWrite counts the writes of Bindings ("binding").
	APIWrite(kind string)
}

// Options configure a Binder.
type Options struct {
	API      API
	Ledger   *ledger.Ledger
	Recorder record.EventRecorder
	Observer Observer
	// Timeout bounds one bind with all its calls.
	Timeout time.Duration
	// Window is the longest time for which Gather collects binds. Zero sends each bind at once.
	Window time.Duration
	// Leading is called right before each write; an error prevents the write.
	Leading func() error
	Clock   clock.WithTicker
}

// Binder binds pods. Its methods are safe for concurrent use.
type Binder struct {
	Options
	tracker   *tracker
	batch     *batch
	term      *termNodes
	listeners []Listener
	// verify are the pods that Verify must still read.
	verify chan gpu.Pod
	// events limits the Events that name a pod's card.
	events *rate.Limiter
}

// New returns a Binder. It writes nothing before Run.
func New(o Options) *Binder {
	term := &termNodes{}
	return &Binder{
		Options: o, term: term, events: rate.NewLimiter(eventsSecond, eventsBurst),
		tracker: &tracker{ledger: o.Ledger, term: term, pods: map[gpu.PodUID]*trackedPod{}},
		batch:   &batch{clock: o.Clock, window: min(o.Window, o.Timeout/4)},
		verify:  make(chan gpu.Pod, maxVerify),
	}
}

// Run resolves unconfirmed binds, and makes the reads of Verify, until ctx ends.
func (b *Binder) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return background.Every(ctx, b.Clock, resolveInterval, b.Resolve) })
	for range maxReads {
		g.Go(func() error { return b.runVerify(ctx) })
	}
	return g.Wait()
}

// Deadline returns how long after its begin a write may still be made, if a bind takes at most timeout. The write is sent
// within the timeout, and the API server abandons it when the same time has passed since its arrival there.
func Deadline(timeout time.Duration) time.Duration { return 2*timeout + deadlineMargin }

// ReadPod reads the pod with this namespace, name and UID from the API server. It returns ErrBadRequest if there is none.
func (b *Binder) ReadPod(ctx context.Context, pod gpu.Pod) (*clustercache.PodInfo, error) {
	found, err := b.read(ctx, pod)
	if err != nil {
		return nil, fmt.Errorf("reading the pod: %w", err)
	}
	b.learn(pod.UID, found)
	if found == nil {
		return nil, fmt.Errorf("%w: there is no pod %s/%s with UID %s", ErrBadRequest, pod.Namespace, pod.Name, pod.UID)
	}
	return found, nil
}

// Gather waits for other binds to be sent together with that of a pod that has been pending for this time, as long as pods arrive
// faster than they are bound. For other pods it returns false at once. If it returns true, everything may have changed meanwhile.
func (b *Binder) Gather(ctx context.Context, pending time.Duration) (waited bool) {
	return b.batch.wait(ctx, pending)
}

// Release releases the pod's allocation if it is assumed: at once if no bind of the pod is in flight and none of its writes is open, and then
// returns true. A bind in flight releases it at its end, as after Claim.Abandon. Otherwise the outcome of the open write decides.
func (b *Binder) Release(uid gpu.PodUID) (released bool) { return b.tracker.releaseOrAbandon(uid) }

// PodBound updates the ledger with a bound pod that the watch reports, and resolves the pod's open bind.
func (b *Binder) PodBound(pod *clustercache.PodInfo) {
	b.watchReported(pod.UID, reasons.ResultBound, func() { setBound(b.Ledger, pod) })
}

// PodGone removes a pod from the ledger that has ended or was deleted, and resolves the pod's open bind.
func (b *Binder) PodGone(uid gpu.PodUID) {
	b.watchReported(uid, reasons.ResultGone, func() { b.Ledger.Remove(uid) })
}

// setBound sets the bound allocation of the pod in the ledger. A pod without GPU memory has none.
func setBound(l *ledger.Ledger, pod *clustercache.PodInfo) {
	if pod.Request == 0 {
		return
	}
	if pod.PlacementErr != nil {
		klog.Background().Error(pod.PlacementErr, "The pod's card can't be read: memory is kept where the node is likely to put the pod",
			"pod", klog.KRef(pod.Namespace, pod.Name), "node", pod.Node)
	}
	l.SetBound(pod.Node, pod.Pod, pod.Placement, pod.AssumeTime)
}

// cards returns the cards of the allocation and the unit of their node. It returns an error if the node no longer has one of the
// cards, or if the pod is on the node without a card.
func (b *Binder) cards(name string, allocation ledger.Allocation) (cards []protocol.AssignedCard, unit gpu.Unit, err error) {
	if allocation.Request == 0 {
		return nil, 0, nil
	}
	node, _ := b.Ledger.Node(name)
	for _, share := range allocation.Placement {
		if i := slices.IndexFunc(node.Cards, func(card gpu.Card) bool { return card.Index == share.Card }); i >= 0 {
			cards = append(cards, protocol.AssignedCard{Index: share.Card, Memory: node.Cards[i].Memory})
		}
	}
	if len(cards) == 0 || len(cards) < len(allocation.Placement) {
		return nil, 0, &ledger.NoRoomError{Node: name, Reason: reasons.Full}
	}
	return cards, node.Unit, nil
}

// The limits of the Events that name a pod's card: on most days each pod gets its Event. If many pods are bound, only
// the first ones and then a few per second get one.
const (
	eventsBurst  = 50
	eventsSecond = 2
)

// reportCard reports the pod's cards in the log and in an Event, once for each pod that this process has bound. While many
// pods are bound, at once or continuously, Events are left out: an Event is one more write per bind, costs as much as
// the bind itself, and repeats the pod's annotations.
func (b *Binder) reportCard(logger klog.Logger, node string, allocation ledger.Allocation, cards []protocol.AssignedCard, unit gpu.Unit) {
	if len(cards) == 0 {
		return
	}
	request := unit.Format(allocation.Request)
	logger.Info("Pod bound", "cards", allocation.Placement.Cards(), "memory", request)
	if !b.events.AllowN(b.Clock.Now(), 1) {
		return
	}
	what := request + " in total"
	if len(cards) == 1 {
		what = request + " of its " + unit.Format(cards[0].Memory)
	}
	b.Recorder.Eventf(apiserver.Reference(allocation.Pod), corev1.EventTypeNormal, EventAssumed, "Assumed GPU %s of node %s: %s",
		allocation.Placement, node, what)
}

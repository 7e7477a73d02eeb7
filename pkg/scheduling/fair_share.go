package scheduling

import (
	"context"
	"crypto/sha256"
	"fmt"
	"sync"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/dispatch"
	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/reclaim"
	"github.com/gpushare/gpushare/pkg/requeue"
)

// FairShareOptions configure fair sharing between tenants.
type FairShareOptions struct {
	// On turns fair sharing on.
	On bool
	// Label is the key of the namespaces' label whose value names the tenant; if it is empty, each namespace is a tenant.
	Label string
	// PriorityCutoff is the lowest priority with which pods need no turn.
	PriorityCutoff int32
	// Provisioning is the number of pods or groups of each tenant whose gates are removed although they fit nowhere, so that an autoscaler adds
	// nodes for them.
	Provisioning int
	// ReclaimAfter is how long a tenant must be below its share before pods of tenants above theirs are evicted for it; 0 means never.
	// Pods that have run for less than MinRuntime are not evicted.
	ReclaimAfter, MinRuntime time.Duration
	// Observer receives what metrics count.
	Observer FairShareObserver
}

// FairShareObserver receives what metrics count. Its methods must return at once.
type FairShareObserver interface {
	dispatch.Observer
	eviction.ReclaimObserver
	// GateOpened counts the writes that remove a gate, by whether they succeeded.
	GateOpened(ok bool)
}

const (
	// minTickPause is the pause between two calls of Tick. It is short, because a pod that fits waits until the next call before its gate is opened.
	// After a long call, the pause is tickPauseFactor times as long as the call took, tickInterval at most.
	minTickPause    = 20 * time.Millisecond
	tickPauseFactor = 20
)

// EventFairShareInvalid is the reason of the Event on a namespace whose labels or annotations for fair sharing are invalid.
const EventFairShareInvalid = "FairShareInvalid"

// fairShare connects a dispatch.Manager to the cluster: it passes in the events and the time, and performs the Effects. A nil
// fairShare means that fair sharing is off.
type fairShare struct {
	FairShareOptions
	manager   *dispatch.Manager
	reclaimer *eviction.Reclaimer
	groups    *groups
	api       API
	requeue   *requeue.Requeuer
	ready     func() error
	recorder  record.EventRecorder
	leading   func() error
	clock     clock.WithTicker
	// writes are the writes that open gates. reclaims is the attempt to reclaim memory; there is at most one in a term.
	writes, reclaims background.Group

	// mu guards problems: those of namespaces, by name.
	mu       sync.Mutex
	problems map[string]*namespaceProblem
}

// awaitsTurn reports whether it isn't the pod's turn, so that filter must reject it.
func (f *fairShare) awaitsTurn(pod gpu.Pod) bool {
	return f != nil && !f.manager.IsAdmitted(pod)
}

// giveUpPlace releases the place of a granted pod that kube-scheduler can't use. It reports whether there was one.
func (f *fairShare) giveUpPlace(uid gpu.PodUID) bool { return f != nil && f.manager.GiveUpPlace(uid) }

// updated passes the state of a pod to the manager.
func (f *fairShare) updated(pod *clustercache.PodInfo) {
	if f == nil {
		return
	}
	if pod.Request == 0 && !pod.Gated {
		f.manager.RemovePod(pod.UID)
		return
	}
	p := dispatch.Pod{
		Pod: pod.Pod, Node: pod.Node, Bound: pod.AssumeTime, Ended: pod.Ended,
		Gated: pod.Gated, GatedOtherwise: pod.GatedOtherwise, Invalid: pod.RequestError != "", Constraints: pod.Constraints,
	}
	if pod.Pending != nil {
		p.Created = pod.Pending.Created
		p.RoomKey = unique.Make(roomKey(pod))
	}
	if m := f.groups.memberOf(pod); m != nil {
		p.Group = m.Gang
	}
	f.manager.SetPod(p)
}

// roomKey returns a short text that is equal for pods that fit the same free resources. It is a cryptographic hash: a user can't make a pod that counts
// as like one that differs.
func roomKey(pod *clustercache.PodInfo) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%v %d %v %s", pod.Demand(), pod.Priority, pod.Requests, pod.Constraints.Value()))
	return string(sum[:])
}

// deleted removes the pod from the manager.
func (f *fairShare) deleted(pod *clustercache.PodInfo) {
	if f != nil {
		f.manager.RemovePod(pod.UID)
	}
}

// freed passes to the manager that GPU memory or other resources were freed on the node, or that the node has changed.
func (f *fairShare) freed(node string) {
	if f != nil && node != "" {
		f.manager.Freed(node)
	}
}

// NamespaceUpdated implements clustercache.NamespaceHandler.
func (f *fairShare) NamespaceUpdated(object *corev1.Namespace) {
	ns, problem := dispatch.ParseNamespace(object.Name, object.Labels, object.Annotations, f.Label)
	f.setProblem(object.Name, string(object.UID), problem)
	f.manager.SetNamespace(object.Name, ns)
}

// NamespaceDeleted implements clustercache.NamespaceHandler.
func (f *fairShare) NamespaceDeleted(name string) {
	f.setProblem(name, "", "")
	f.manager.RemoveNamespace(name)
}

// namespaceProblem is what is wrong with the labels or annotations of a namespace.
type namespaceProblem struct {
	uid, text string
	reported  bool
}

// setProblem sets the problem of a namespace; an empty text means none.
func (f *fairShare) setProblem(name, uid, text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if former := f.problems[name]; text == "" {
		delete(f.problems, name)
	} else if former == nil || former.text != text {
		f.problems[name] = &namespaceProblem{uid: uid, text: text}
	}
}

// run calls the manager's Tick until ctx ends, and starts and stops leading with the term.
func (f *fairShare) run(ctx context.Context) error {
	timer := f.clock.NewTimer(minTickPause)
	defer timer.Stop()
	defer func() { _, _ = f.writes.Wait(), f.reclaims.Wait() }() // They return no errors.
	for {
		select {
		case <-ctx.Done():
			f.manager.StopLeading()
			return nil
		case <-timer.C():
		}
		begin := f.clock.Now()
		f.tick(ctx)
		timer.Reset(min(max(minTickPause, tickPauseFactor*f.clock.Since(begin)), tickInterval))
	}
}

// tick makes a step if this process is the leader.
func (f *fairShare) tick(ctx context.Context) {
	if f.leading() != nil || f.ready() != nil {
		f.manager.StopLeading()
		return
	}
	f.manager.StartLeading()
	f.reportProblems(ctx)
	f.manager.Tick(f.clock.Now())
	f.perform(ctx, f.manager.TakeEffects())
}

// reportProblems reports invalid annotations of namespaces that weren't reported yet.
func (f *fairShare) reportProblems(ctx context.Context) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name, problem := range f.problems {
		if problem.reported {
			continue
		}
		problem.reported = true
		klog.FromContext(ctx).Error(nil, "Invalid labels or annotations of a namespace for fair sharing: its tenant gets the default values",
			"namespace", name, "reason", problem.text)
		f.recorder.Event(&corev1.ObjectReference{APIVersion: "v1", Kind: "Namespace", Name: name, UID: types.UID(problem.uid)},
			corev1.EventTypeWarning, EventFairShareInvalid, "The default value is used: "+problem.text)
	}
}

// perform performs the effects of a tick. The writes go on in the background; their results are passed to the manager.
func (f *fairShare) perform(ctx context.Context, effects dispatch.Effects) {
	if effects.Requeue {
		f.requeue.RequeueAll("")
	}
	if search := effects.Reclaim; search != nil {
		f.reclaims.Go(func() error {
			until := f.reclaimer.Reclaim(ctx, search.Need(), func(plan reclaim.Plan) bool { return f.manager.Hold(search, plan) })
			f.manager.Reclaimed(search, until)
			return nil
		})
	}
	for _, pod := range effects.Open {
		f.writes.Go(func() error {
			f.openGate(ctx, pod)
			return nil
		})
	}
}

// openGate removes the gate of one pod.
func (f *fairShare) openGate(ctx context.Context, pod gpu.Pod) {
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(pod.Namespace, pod.Name))
	opened := false
	defer func() { f.manager.GateOpened(pod.UID, opened) }()
	if f.leading() != nil {
		return
	}
	err := f.api.OpenGate(ctx, pod, protocol.GateFairShare)
	switch {
	case err == nil:
		opened = true
	case apierrors.IsNotFound(err):
		return // The watch will report it.
	default:
		logger.Error(err, "Scheduling gate not removed, trying again")
	}
	f.Observer.GateOpened(opened)
}

// turns returns the turns of the pods that wait for one.
func (f *fairShare) turns() map[gpu.PodUID]reasons.Turn {
	if f == nil {
		return nil
	}
	return f.manager.Turns()
}

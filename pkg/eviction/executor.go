package eviction

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/apiserver"
	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
)

// outdatedAfter is how long after its begin the eviction of a group is not finished any more: no extender has evicted pods for so long that the group
// can be whole again.
const outdatedAfter = time.Hour

// Victim is a pod, or the members of a group. These are evicted together or not at all.
type Victim struct {
	Pods []PodID `json:"pods"`
	// For is the pod for which it is evicted. Message is that of the Events on the victim's pods.
	For     PodID  `json:"for"`
	Message string `json:"-"`
	// Cause is why it is evicted.
	Cause Cause `json:"cause"`
}

// PodID identifies a pod.
type PodID struct {
	Namespace string     `json:"namespace"`
	Name      string     `json:"name"`
	UID       gpu.PodUID `json:"uid"`
}

// IDs returns what identifies the pods.
func IDs(pods ...gpu.Pod) []PodID {
	ids := make([]PodID, len(pods))
	for i, pod := range pods {
		ids[i] = PodID{pod.Namespace, pod.Name, pod.UID}
	}
	return ids
}

func (p PodID) pod() gpu.Pod { return gpu.Pod{Namespace: p.Namespace, Name: p.Name, UID: p.UID} }

// Cause is why pods are evicted for others.
type Cause string

const (
	// ByPriority means that the others have a higher priority.
	ByPriority Cause = "priority"
	// ByShare means that the tenant of the others is below its share.
	ByShare Cause = "share"
)

// Executor makes the evictions for pods that wait. A group is recorded before the first of its pods is evicted. If the API server then refuses to evict
// the others, they are tried again; if this process stops leading, the next leader does that.
//
// Its methods are safe for concurrent use; mu guards the fields below it, and is never held during a call to the API server.
type Executor struct {
	evictor
	// record is the ConfigMap with the groups.
	record types.NamespacedName

	mu sync.Mutex
	// holder is the name of this process's term in the record; empty until the groups of the former leader are known.
	holder string
	// groups are those of which a pod may have been evicted and another one may be left, by their first pod. unwritten is true if the record has
	// other ones.
	groups    map[gpu.PodUID]*group
	unwritten bool
	// asked is when the eviction of each pod was last requested, unless the API server has refused it.
	asked map[gpu.PodUID]time.Time
	// spared are the victims whose eviction was refused or got no answer in time, for a while.
	spared queue.Pauses[gpu.PodUID]
}

// group is a victim of several pods, from the record of its eviction until all of its pods or none are evicted.
type group struct {
	Victim
	// Began is when it was recorded first.
	Began time.Time `json:"began"`
	// until is a minute after the last of its pods should have ended. Then it is given up if the API server refuses the eviction of the others. It is
	// zero while Evict makes the first calls for it.
	until time.Time
}

// id identifies the group.
func (g *group) id() gpu.PodUID { return g.Pods[0].UID }

// NewExecutor returns an Executor with its ConfigMap. It evicts nothing before Tick has read the groups of the former leader.
func NewExecutor(o Options, record types.NamespacedName) *Executor {
	x := &Executor{evictor: evictor{o}, record: record}
	x.resign()
	return x
}

// Run finishes the eviction of groups until ctx ends.
func (x *Executor) Run(ctx context.Context) error {
	return background.Every(ctx, x.Clock, queue.Retry, x.Tick)
}

// Tick performs one step of Run.
func (x *Executor) Tick(ctx context.Context) {
	logger := klog.FromContext(ctx)
	switch {
	case x.Leading() != nil:
		x.resign()
		return
	case x.Cache.Ready() != nil:
		return
	case !x.Ready():
		if err := x.inherit(ctx); err != nil {
			logger.Error(err, "Record of evictions not read, trying again: until it is, no pods are evicted for others")
		}
		return
	}
	for _, g := range x.unfinished() {
		if err := x.finish(ctx, g); err != nil {
			logger.Error(err, "Not all pods of a group evicted, trying again unless it is given up", "for", g.For.pod().String())
		}
	}
	x.mu.Lock()
	holder, unwritten := x.holder, x.unwritten
	x.mu.Unlock()
	if unwritten {
		if err := x.writeRecord(ctx, holder); err != nil {
			logger.Error(err, "Record of evictions not written, trying again: until it is, no groups are evicted for others")
		}
	}
}

// resign forgets all groups. The next leader has the record.
func (x *Executor) resign() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.groups, x.asked, x.spared = map[gpu.PodUID]*group{}, map[gpu.PodUID]time.Time{}, queue.Pauses[gpu.PodUID]{}
	x.holder, x.unwritten = "", false
}

// Ready reports whether evictions can begin now: the groups of the former leader are known.
func (x *Executor) Ready() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.holder != ""
}

// DryRun reports whether the API server would evict each of the victims that still run. It returns the first error. A victim whose eviction is refused, or
// gets no answer in time, stays out of plans for a while.
func (x *Executor) DryRun(ctx context.Context, victims []Victim) error {
	return x.forEach(victims, func(v Victim, pod gpu.Pod) error {
		_, _, err := x.try(ctx, v, pod, true)
		return err
	})
}

// forEach calls a function for each pod of the victims, several at a time, as long as this process leads. It returns the first error.
func (x *Executor) forEach(victims []Victim, call func(Victim, gpu.Pod) error) error {
	group := x.NewGroup(maxConcurrent)
	for _, v := range victims {
		for _, pod := range v.Pods {
			group.Go(func() error {
				if err := x.Leading(); err != nil {
					return err
				}
				return call(v, pod.pod())
			})
		}
	}
	return group.Wait()
}

// try requests the eviction of a pod of a victim.
func (x *Executor) try(ctx context.Context, v Victim, pod gpu.Pod, dryRun bool) (ends time.Time, gone bool, err error) {
	ends, gone, err = x.request(ctx, pod, dryRun)
	if err != nil {
		x.refuse(v, err)
		err = fmt.Errorf("evicting pod %s: %w", pod, err)
	}
	return ends, gone, err
}

// Evict evicts the victims after a successful DryRun, the first pod alone: if its eviction fails, nothing is evicted. What fails later is tried again
// only for pods of groups. Evict returns the first error, and until when places are to be kept for the pods that wait: a minute after the last victim
// should have ended. until is zero if nothing was evicted, unless no eviction was needed because enough pods are being deleted already, or an answer was
// lost.
func (x *Executor) Evict(ctx context.Context, victims []Victim) (until time.Time, err error) {
	if len(victims) == 0 { // What is being deleted already is enough.
		return x.Clock.Now().Add(protocol.MaxGracePeriod), nil
	}
	groups, holder, err := x.begin(victims)
	if err == nil && len(groups) > 0 {
		err = x.writeRecord(ctx, holder)
	}
	if err == nil {
		first := victims[0]
		first.Pods = first.Pods[:1]
		until, err = x.evict(ctx, []Victim{first})
	}
	if !until.IsZero() {
		others := slices.Clone(victims)
		others[0].Pods = others[0].Pods[1:]
		later, failed := x.evict(ctx, others)
		until, err = latest(until, later), cmp.Or(err, failed)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, g := range groups {
		g.until = until
	}
	if !until.IsZero() {
		return until, err // Tick finishes the groups.
	}
	for _, v := range victims {
		for _, pod := range v.Pods {
			delete(x.asked, pod.UID)
		}
	}
	for _, g := range groups {
		x.forget(g)
	}
	return until, err
}

// begin makes the victims those of this process. It returns those that are groups, and the name of the term.
func (x *Executor) begin(victims []Victim) (groups []*group, holder string, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.holder == "" {
		return nil, "", errNotHeld
	}
	now := x.Clock.Now()
	for _, v := range victims {
		for _, pod := range v.Pods {
			x.asked[pod.UID] = now
		}
		if len(v.Pods) > 1 {
			g := &group{Victim: v, Began: now.UTC()}
			x.groups[g.id()], groups = g, append(groups, g)
		}
	}
	return groups, x.holder, nil
}

// evict evicts the pods of the victims. It returns the first error, and a minute after the last of those should have ended that were evicted, may have
// been, or were gone already; zero if there are none.
func (x *Executor) evict(ctx context.Context, victims []Victim) (until time.Time, err error) {
	err = x.forEach(victims, func(v Victim, pod gpu.Pod) error {
		x.mu.Lock()
		x.asked[pod.UID] = x.Clock.Now() // Before the call, because its answer may be lost.
		x.mu.Unlock()
		ends, gone, err := x.try(ctx, v, pod, false)
		x.mu.Lock()
		defer x.mu.Unlock()
		if errors.Is(err, errUnread) || err != nil && apiserver.OutcomeOf(err) != apiserver.Unknown {
			delete(x.asked, pod.UID)
			return err
		}
		until = latest(until, latest(ends, x.Clock.Now()).Add(queue.ArrivalTimeout))
		if err == nil && !gone {
			x.report(v, pod)
		}
		return err
	})
	return until, err
}

// report counts the eviction of a pod, and records its Event.
func (x *Executor) report(v Victim, pod gpu.Pod) {
	if v.Cause != ByShare {
		x.Recorder.Event(apiserver.Reference(pod), corev1.EventTypeNormal, EventEvicted, v.Message)
		return
	}
	// A former leader may have begun it, and this one doesn't reclaim.
	if info := x.cached(pod); x.Reclaims != nil && info != nil {
		x.Reclaims.PodReclaimed(info.Request)
	}
	x.Recorder.Event(apiserver.Reference(pod), corev1.EventTypeNormal, EventReclaimed, v.Message)
}

// latest returns the later of two times.
func latest(a, b time.Time) time.Time { return slices.MaxFunc([]time.Time{a, b}, time.Time.Compare) }

// forget removes a group. The caller holds the lock.
func (x *Executor) forget(g *group) {
	if x.groups[g.id()] == g { // Else this process leads another term by now.
		delete(x.groups, g.id())
		x.unwritten = true
	}
}

// unfinished returns the groups for which Evict makes no calls any more.
func (x *Executor) unfinished() []*group {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := x.Clock.Now()
	x.spared.Prune(now, queue.LongestPause)
	maps.DeleteFunc(x.asked, func(_ gpu.PodUID, at time.Time) bool { return now.Sub(at) > x.AnswerLost })
	return slices.DeleteFunc(x.sorted(), func(g *group) bool { return g.until.IsZero() })
}

// sorted returns the groups in a stable order. The caller holds the lock.
func (x *Executor) sorted() (groups []*group) {
	for _, uid := range slices.Sorted(maps.Keys(x.groups)) {
		groups = append(groups, x.groups[uid])
	}
	return groups
}

// finish evicts the rest of a group if a pod of it was evicted. If none was, or if none is left, the group is forgotten.
func (x *Executor) finish(ctx context.Context, g *group) error {
	rest, begun, err := x.examine(ctx, g)
	if err != nil {
		return err
	}
	if begun {
		_, err = x.evict(ctx, []Victim{rest})
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	switch {
	case !begun && slices.ContainsFunc(g.Pods, x.isAsked): // An answer is lost, and the eviction may still be made.
		return nil
	case err != nil && (!answered(err) || !x.Clock.Now().Add(queue.Retry).After(g.until)):
		return err
	}
	x.forget(g)
	if err != nil {
		err = fmt.Errorf("given up, pods of the group of %s stay: %w", g.Pods[0].pod(), err)
	}
	return err
}

// examine reads the pods of a group. It returns those that are left, and whether one was evicted. Those that have ended by themselves are neither.
func (x *Executor) examine(ctx context.Context, g *group) (rest Victim, begun bool, err error) {
	rest = g.Victim
	rest.Pods = nil
	for _, pod := range g.Pods {
		live, err := x.API.Pod(ctx, pod.Namespace, pod.Name)
		switch {
		case apierrors.IsNotFound(err):
			begun = true
		case err != nil:
			return rest, false, fmt.Errorf("reading pod %s: %w", pod.pod(), err)
		case gpu.PodUID(live.UID) != pod.UID:
			begun = true
		case live.DeletionTimestamp != nil && !protocol.Lingers(live):
			begun, g.until = true, latest(g.until, live.DeletionTimestamp.Add(queue.ArrivalTimeout))
		case !protocol.Terminal(live):
			rest.Pods = append(rest.Pods, pod)
		}
	}
	return rest, begun, nil
}

// IsEvicting reports whether the pod is a victim and its deletion may not be visible yet.
func (x *Executor) IsEvicting(uid gpu.PodUID) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.isAsked(PodID{UID: uid}) {
		return true
	}
	for _, g := range x.groups {
		if slices.ContainsFunc(g.Pods, func(pod PodID) bool { return pod.UID == uid }) {
			return true
		}
	}
	return false
}

// isAsked reports whether the eviction of the pod was requested a short time ago and not refused. The caller holds the lock.
func (x *Executor) isAsked(pod PodID) bool {
	at, asked := x.asked[pod.UID]
	return asked && x.Clock.Since(at) <= x.AnswerLost
}

// mayEvict reports whether the eviction of a pod with these budgets is likely to be made: the API server evicts no pod with several budgets
// (k8s.io/kubernetes pkg/registry/core/pod/storage/eviction.go), may refuse again what it refused a short time ago, and what is
// evicted already is no victim of another plan.
func (x *Executor) mayEvict(uid gpu.PodUID, budgets []int) bool {
	if len(budgets) > 1 || x.IsEvicting(uid) {
		return false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return !x.spared.Has(uid, x.Clock.Now())
}

// refuse keeps a victim out of plans for a while if the API server has refused its eviction, or has not answered in time.
func (x *Executor) refuse(v Victim, err error) {
	least := queue.LongestPause
	switch {
	case timedOut(err):
		least = queue.ArrivalTimeout // Longer than an attempt in which many of them time out.
	case !answered(err):
		return
	// The API server fails, or can't reach a webhook: perhaps for all pods, and not for long.
	case apierrors.ReasonForError(err) == metav1.StatusReasonInternalError:
		least = queue.Retry
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, pod := range v.Pods {
		if !x.spared.Has(pod.UID, x.Clock.Now()) { // Another member of its group may have been refused too.
			x.spared.Extend(pod.UID, x.Clock.Now(), least, queue.LongestPause)
		}
	}
}

package eviction

import (
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
	// For is the pod for which it is evicted. What and Why precede and follow it in the message of the Events on the victim's pods.
	For  PodID  `json:"for"`
	What string `json:"-"`
	Why  string `json:"-"`
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

var (
	// errOutdated means that nothing was evicted because the API server shows other pods than the cache: the watch may have stalled.
	errOutdated = errors.New("the cache is behind the API server")
	// errEvictionLost means that it is unknown whether an eviction was made.
	errEvictionLost = errors.New("the answer is lost")
	// errUnread means that nothing can be evicted now, see Executor.Ready.
	errUnread = errors.New("the record of evictions isn't read yet")
)

// Executor makes the evictions for pods that wait. A group is recorded before the first of its pods is evicted. If the eviction of others is refused,
// it is tried again; if this process stops leading, the next leader does that.
//
// Its methods are safe for concurrent use; mu guards the fields below it, and is never held during a call to the API server.
type Executor struct {
	evictor
	// record is the ConfigMap with the groups.
	record types.NamespacedName

	mu sync.Mutex
	// groups are those of which a pod may have been evicted and another one is left, by their first pod.
	groups map[gpu.PodUID]*group
	// asked is when the eviction of each pod was last requested. Evict removes those that were refused.
	asked map[gpu.PodUID]time.Time
	// spared are the victims whose eviction was refused, for a while.
	spared queue.Pauses[gpu.PodUID]
	// read is true once the groups of the former leader are known. again is when the record is read or written next after a failure. holder and
	// version are those of the record.
	read            bool
	again           time.Time
	holder, version string
	// unwritten is true if the record has other groups than there are.
	unwritten bool
}

// group is a victim of several pods, from the record of its eviction until all of its pods or none are evicted.
type group struct {
	Victim
	// Began is when it was recorded first.
	Began time.Time `json:"began"`
	// left are its pods that are to be evicted. begun is true once one was evicted, or may have been. inherited is true if a former leader has recorded
	// the group, until this is known.
	left             []PodID
	begun, inherited bool
	// calling is true while Evict makes the first calls for it. next is when further ones are made. If the API server refuses the last ones before until, or
	// one after it, the group is given up.
	calling     bool
	next, until time.Time
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
	return background.Every(ctx, x.Clock, interval, x.Tick)
}

// Tick performs one step of Run.
func (x *Executor) Tick(ctx context.Context) {
	if x.Leading() != nil {
		x.resign()
		return
	}
	if x.Cache.Ready() != nil {
		return
	}
	for _, g := range x.due() {
		if err := x.finish(ctx, g); err != nil {
			klog.FromContext(ctx).Error(err, "Not all pods of a group evicted, trying again unless it is given up", "for", g.For.pod().String())
		}
	}
	x.mu.Lock()
	now := x.Clock.Now()
	sync, failed := x.writeRecord, "Record of evictions not written, trying again: until it is, no groups are evicted for others"
	if !x.read {
		sync, failed = x.inherit, "Record of evictions not read, trying again: until it is, no pods are evicted for others"
	}
	skip := now.Before(x.again) || x.read && !x.unwritten
	x.mu.Unlock()
	if skip {
		return
	}
	if err := sync(ctx); err != nil {
		x.mu.Lock()
		x.again = now.Add(queue.Retry)
		x.mu.Unlock()
		klog.FromContext(ctx).Error(err, failed)
	}
}

// resign forgets all groups. The next leader has the record.
func (x *Executor) resign() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.groups, x.asked, x.spared = map[gpu.PodUID]*group{}, map[gpu.PodUID]time.Time{}, queue.Pauses[gpu.PodUID]{}
	x.read, x.again, x.unwritten = false, time.Time{}, false
}

// Ready reports whether evictions can begin now: the groups of the former leader are known.
func (x *Executor) Ready() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.read
}

// DryRun reports whether the API server would evict each of the victims that still run. It returns the first error. A victim whose eviction is refused
// stays out of plans for a while.
func (x *Executor) DryRun(ctx context.Context, victims []Victim) error {
	return x.forEach(victims, func(v Victim, pod gpu.Pod) error {
		if err := x.Leading(); err != nil {
			return err
		}
		state, err := x.readVictim(ctx, pod)
		if err != nil || !state.runs {
			return err
		}
		if _, err := x.call(ctx, pod, state, true); err != nil {
			x.refuse(v, err)
			return fmt.Errorf("evicting pod %s: %w", pod, err)
		}
		return nil
	})
}

// forEach calls a function for each pod of the victims, several at a time. It returns the first error.
func (x *Executor) forEach(victims []Victim, call func(Victim, gpu.Pod) error) error {
	group := x.NewGroup(maxConcurrent)
	for _, v := range victims {
		for _, pod := range v.Pods {
			group.Go(func() error { return call(v, pod.pod()) })
		}
	}
	return group.Wait()
}

// Evict evicts the victims after a successful DryRun, the first pod alone: if its eviction fails, nothing is evicted. What fails later is tried again
// only for pods of groups. Evict returns the pods that were evicted, the first error, and until when places are to be kept for the pods that wait: a
// minute after the last victim should have ended; zero if nothing was evicted. It isn't if enough pods are being deleted already, or if an answer was
// lost.
func (x *Executor) Evict(ctx context.Context, victims []Victim) (evicted []gpu.PodUID, until time.Time, err error) {
	if len(victims) == 0 { // What is being deleted already is enough.
		return nil, x.Clock.Now().Add(protocol.MaxGracePeriod), nil
	}
	groups, err := x.begin(victims)
	if err != nil {
		return nil, time.Time{}, err
	}
	out := &results{done: map[gpu.PodUID]bool{}}
	if len(groups) > 0 {
		if err = x.writeRecord(ctx); err == nil && !x.keeps(groups) {
			err = errUnread // This process has led another term meanwhile: the record doesn't have them.
		}
	}
	if err == nil {
		first := victims[0]
		first.Pods = first.Pods[:1]
		err = x.evict(ctx, []Victim{first}, out)
	}
	if len(out.done) > 0 {
		others := slices.Clone(victims)
		others[0].Pods = others[0].Pods[1:]
		if failed := x.evict(ctx, others, out); err == nil {
			err = failed
		}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, v := range victims {
		for _, pod := range v.Pods {
			if _, may := out.done[pod.UID]; !may {
				delete(x.asked, pod.UID)
			}
		}
	}
	for _, g := range groups {
		x.settle(g, out)
	}
	return out.evicted, out.until, err
}

// begin makes the victims those of this process, and returns those that are groups.
func (x *Executor) begin(victims []Victim) (groups []*group, err error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.read {
		return nil, errUnread
	}
	now := x.Clock.Now()
	for _, v := range victims {
		for _, pod := range v.Pods {
			x.asked[pod.UID] = now
		}
		if len(v.Pods) > 1 {
			g := &group{Victim: v, Began: now.UTC(), left: v.Pods, calling: true}
			x.groups[g.id()], groups = g, append(groups, g)
		}
	}
	return groups, nil
}

// keeps reports whether the groups are still those of this process.
func (x *Executor) keeps(groups []*group) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return !slices.ContainsFunc(groups, func(g *group) bool { return x.groups[g.id()] != g })
}

// results are those of evictions that are made at the same time. mu guards the fields.
type results struct {
	mu sync.Mutex
	// evicted are the pods that were evicted. done has these and those that were gone already, and false for those whose answer is lost.
	evicted []gpu.PodUID
	done    map[gpu.PodUID]bool
	// until is the latest of their deletion timestamps, or now, and a minute.
	until time.Time
}

// add adds the result for a pod.
func (r *results) add(uid gpu.PodUID, done bool, ends, now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.done[uid] = done
	if ends.Before(now) {
		ends = now
	}
	if until := ends.Add(queue.Arrival); until.After(r.until) {
		r.until = until
	}
}

// evict evicts the pods of the victims, and adds the results. It returns the first error.
func (x *Executor) evict(ctx context.Context, victims []Victim, out *results) error {
	return x.forEach(victims, func(v Victim, pod gpu.Pod) error {
		made, err := x.evictOne(ctx, v, pod, out)
		if made {
			out.mu.Lock()
			defer out.mu.Unlock()
			out.evicted = append(out.evicted, pod.UID)
		}
		return err
	})
}

// evictOne evicts a pod of a victim. made is false if the pod is gone.
func (x *Executor) evictOne(ctx context.Context, v Victim, pod gpu.Pod, out *results) (made bool, err error) {
	if err := x.Leading(); err != nil {
		return false, err
	}
	x.mu.Lock()
	x.asked[pod.UID] = x.Clock.Now() // Before the call, because its answer may be lost.
	x.mu.Unlock()
	ends, gone, err := x.request(ctx, pod)
	if err != nil {
		x.refuse(v, err)
		if apiserver.OutcomeOf(err) == apiserver.Unknown {
			out.add(pod.UID, false, ends, x.Clock.Now())
			err = fmt.Errorf("%w: %w", errEvictionLost, err)
		}
		return false, fmt.Errorf("evicting pod %s: %w", pod, err)
	}
	out.add(pod.UID, true, ends, x.Clock.Now())
	switch {
	case gone:
	case v.Cause == ByShare:
		// A former leader may have begun it, and this one doesn't reclaim.
		if info, known := x.Cache.Pod(pod.Namespace, pod.Name); x.Reclaims != nil && known && info.UID == pod.UID {
			x.Reclaims.PodReclaimed(info.Request)
		}
		x.Recorder.Eventf(apiserver.Reference(pod), corev1.EventTypeNormal, EventReclaimed, "%s for pod %s%s", v.What, v.For.pod(), v.Why)
	default:
		x.Recorder.Eventf(apiserver.Reference(pod), corev1.EventTypeNormal, EventEvicted, "%s for pod %s%s", v.What, v.For.pod(), v.Why)
	}
	return !gone, nil
}

// settle keeps a group if a pod of it was evicted, or may have been, and another one is left; otherwise it forgets the group. The caller holds the
// lock.
func (x *Executor) settle(g *group, out *results) {
	g.left = slices.DeleteFunc(slices.Clone(g.Pods), func(pod PodID) bool { return out.done[pod.UID] })
	g.begun = g.begun || slices.ContainsFunc(g.Pods, func(pod PodID) bool { _, may := out.done[pod.UID]; return may })
	if !g.begun || len(g.left) == 0 {
		x.forget(g)
	}
	g.calling, g.next, g.until = false, x.Clock.Now().Add(queue.Retry), out.until
}

// forget removes a group. The caller holds the lock.
func (x *Executor) forget(g *group) {
	if x.groups[g.id()] == g {
		delete(x.groups, g.id())
		x.unwritten = true
	}
}

// due returns the groups whose pods are to be evicted now.
func (x *Executor) due() (due []*group) {
	x.mu.Lock()
	defer x.mu.Unlock()
	now := x.Clock.Now()
	x.spared.Prune(now, queue.LongestPause)
	maps.DeleteFunc(x.asked, func(_ gpu.PodUID, at time.Time) bool { return now.Sub(at) > x.AnswerLost })
	for _, g := range x.present() {
		if !g.calling && !now.Before(g.next) {
			due = append(due, g)
		}
	}
	return due
}

// finish evicts the rest of a group. If a former leader has recorded it, finish only finds out whether a pod was evicted; if not, none is.
func (x *Executor) finish(ctx context.Context, g *group) (err error) {
	out := &results{done: map[gpu.PodUID]bool{}, until: g.until}
	if g.inherited {
		err = x.examine(ctx, g, out)
	} else {
		for _, pod := range g.Pods {
			if !slices.Contains(g.left, pod) {
				out.done[pod.UID] = true
			}
		}
		rest := g.Victim
		rest.Pods = g.left
		err = x.evict(ctx, []Victim{rest}, out)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if g.inherited && err != nil {
		g.next = x.Clock.Now().Add(queue.Retry)
		return err
	}
	givenUp := x.Clock.Now().Add(queue.Retry).After(g.until) && answered(err)
	g.inherited = false
	x.settle(g, out)
	if givenUp && len(g.left) > 0 {
		x.forget(g)
		return fmt.Errorf("given up, %d of %d pods of the group of %s stay: %w", len(g.left), len(g.Pods), g.Pods[0].pod(), err)
	}
	return err
}

// examine adds the pods of a group that are gone or being deleted to the results. Those that have ended by themselves were not evicted.
func (x *Executor) examine(ctx context.Context, g *group, out *results) error {
	return x.forEach([]Victim{g.Victim}, func(_ Victim, pod gpu.Pod) error {
		live, err := x.API.Pod(ctx, pod.Namespace, pod.Name)
		switch {
		case apierrors.IsNotFound(err):
			out.add(pod.UID, true, time.Time{}, x.Clock.Now())
		case err != nil:
			return fmt.Errorf("reading pod %s: %w", pod, err)
		case gpu.PodUID(live.UID) != pod.UID:
			out.add(pod.UID, true, time.Time{}, x.Clock.Now())
		case live.DeletionTimestamp != nil && !protocol.Lingers(live):
			out.add(pod.UID, true, live.DeletionTimestamp.Time, x.Clock.Now())
		}
		return nil
	})
}

// inherit reads the groups of the former leader.
func (x *Executor) inherit(ctx context.Context) error {
	groups, err := x.readRecord(ctx)
	if err != nil {
		x.Observer.EvictionRecordFailed()
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	now := x.Clock.Now()
	for _, g := range groups {
		if now.Sub(g.Began) > outdatedAfter {
			x.unwritten = true
			continue
		}
		g.What, g.Why = "Evicted after others", ", of which a former leader of the extender began the evictions"
		g.inherited, g.left = true, g.Pods
		g.next = now.Add(x.AnswerLost) // Until then an eviction of the former leader can still be made.
		g.until = g.next.Add(queue.Arrival)
		x.groups[g.id()] = g
	}
	x.read, x.again = true, time.Time{}
	return nil
}

// IsEvicting reports whether the pod is a victim and its deletion may not be visible yet.
func (x *Executor) IsEvicting(uid gpu.PodUID) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if at, asked := x.asked[uid]; asked && x.Clock.Since(at) <= x.AnswerLost {
		return true
	}
	for _, g := range x.groups {
		if slices.ContainsFunc(g.left, func(pod PodID) bool { return pod.UID == uid }) {
			return true
		}
	}
	return false
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

// refuse keeps a victim out of plans for a while if the API server has refused its eviction.
func (x *Executor) refuse(v Victim, err error) {
	if !answered(err) {
		return
	}
	least := queue.LongestPause
	// The API server fails, or can't reach a webhook: perhaps for all pods, and not for long.
	if apierrors.ReasonForError(err) == metav1.StatusReasonInternalError {
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

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

// maxRounds limits the rounds at one time.
const maxRounds = 16

// outdatedAfter is how long after its begin a round of a former leader is not finished any more: no extender has evicted pods for so long that the
// groups that it has evicted in part can be whole again.
const outdatedAfter = time.Hour

// Round is what is known of a round before its first eviction: the pods that wait, and what is evicted for them. Extenders of other versions read and
// write it too, in the record.
type Round struct {
	Cause Cause `json:"cause"`
	// Began is when it was recorded first; zero in records of earlier versions.
	Began time.Time `json:"began,omitzero"`
	// For are the pods that wait. Their places are reserved until they have them, or until the round ends.
	For     []Waiting `json:"for"`
	Victims []Victim  `json:"victims"`
}

// Waiting is a pod that waits, with its place.
type Waiting struct {
	PodID
	Node  string `json:"node"`
	Cards []int  `json:"cards"`
}

// Victim is a pod, or the members of a group. These are evicted together or not at all.
type Victim struct {
	Pods []PodID `json:"pods"`
	// For is the pod for which it is evicted. What and Why precede and follow it in the message of the Events on the victim's pods.
	For  PodID  `json:"for"`
	What string `json:"-"`
	Why  string `json:"-"`
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
	// errFull means that no further round can begin now, see Executor.Full.
	errFull = errors.New("too many rounds of evictions are in progress, or one for this pod, or their record isn't read yet")
)

// Executor makes the evictions for pods that wait, in rounds. Each round is recorded before its first eviction, so that the next leader
// finishes what this one began. Refusals after the dry run are retried until the round ends.
//
// Its methods are safe for concurrent use; mu guards the fields below it, and is never held during a call to the API server.
type Executor struct {
	Options
	// record is the ConfigMap with the rounds.
	record types.NamespacedName

	mu sync.Mutex
	// rounds are by the first pod that waits.
	rounds map[gpu.PodUID]*execution
	// spared are the victims whose eviction was refused, for a while.
	spared queue.Pauses[gpu.PodUID]
	// read is true once the rounds of the former leader are known. again is when the record is read or written next after a failure. holder and
	// version are those of the record.
	read            bool
	again           time.Time
	holder, version string
	// unwritten is true if the record has other rounds than there are.
	unwritten bool
}

// execution is a round in progress.
type execution struct {
	Round
	state executionState
	// wanted is nil for a former leader's round until Continue.
	wanted Wanted
	// left has the pods of the victims: true for those that are to be evicted, false for those whose eviction was made. Victims that aren't wanted any
	// more are removed.
	left map[gpu.PodUID]bool
	// justified is what wanted has returned last, at first all pods for which there are victims. Of victims for other pods, only the rest of groups that
	// were evicted in part is evicted.
	justified map[gpu.PodUID]bool
	// until is the end of the round, next the time of the next attempt, asked that of the latest eviction call. lost is until when the eviction of a
	// group's pod whose answer is lost can still be made; zero if there is none.
	until, next, asked, lost time.Time
}

// Wanted returns the pods that still wait for the places of a round: true for those for which further victims may be evicted now. The rest of a group
// that was evicted in part is evicted in any case.
type Wanted func() map[gpu.PodUID]bool

// executionState is how far a round is.
//
//	           → calling   Evict has recorded the round
//	           → inherited a former leader has recorded the round
//	inherited  → called    Continue: its pods still wait
//	inherited  → calling   queue.Arrival and AnswerLost are over: for the rest of groups that are evicted in part
//	calling    → called    the calls have returned
//	called     → calling   queue.Retry is over, and pods that are left are still wanted
//	any        → no round  nothing was evicted; the round's end has come; no pod waits for it, and no group is evicted in part; the term ends
type executionState int

const (
	calling executionState = iota
	inherited
	called
)

// NewExecutor returns an Executor with its ConfigMap. It evicts nothing before Tick has read the rounds of the former leader.
func NewExecutor(o Options, record types.NamespacedName) *Executor {
	x := &Executor{Options: o, record: record}
	x.resign()
	return x
}

// Run continues rounds until ctx ends.
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
	x.mu.Lock()
	x.spared.Prune(x.Clock.Now(), queue.LongestPause)
	x.mu.Unlock()
	for _, ex := range x.due() {
		if _, err := x.evictLeft(ctx, ex); err != nil {
			klog.FromContext(ctx).Error(err, "Not all pods of a round evicted, trying again until the round ends", "for", ex.For[0].pod().String())
		}
	}
	x.mu.Lock()
	now := x.Clock.Now()
	sync := x.writeRecord
	if !x.read {
		sync = x.inherit
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
		klog.FromContext(ctx).Error(err, "Record of evictions not read or written, trying again: until it is read, no pods are evicted for others")
	}
}

// resign forgets all rounds. The next leader has the record.
func (x *Executor) resign() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.rounds, x.spared = map[gpu.PodUID]*execution{}, queue.Pauses[gpu.PodUID]{}
	x.read, x.again, x.unwritten = false, time.Time{}, false
}

// Check reports whether the API server would evict each of the victims that still run. It returns the first error. A victim whose eviction is refused
// stays out of plans for a while.
func (x *Executor) Check(ctx context.Context, victims []Victim) error {
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

// Evict evicts the victims of a round whose Check was successful, and goes on with those that are refused as long as they are wanted. It
// returns the pods that were evicted at once, the end of the round, and the first error. The end is zero if the round has not begun, or is over
// because no eviction was made. It isn't if enough pods are being deleted already, or if an answer was lost.
func (x *Executor) Evict(ctx context.Context, r Round, wanted Wanted) (evicted []gpu.PodUID, until time.Time, err error) {
	r.Began = x.Clock.Now().UTC()
	ex := newExecution(r)
	ex.wanted, ex.until = wanted, x.Clock.Now().Add(queue.Arrival)
	if len(ex.left) == 0 { // What is being deleted already is enough.
		ex.until = x.Clock.Now().Add(protocol.MaxGracePeriod)
	}
	x.mu.Lock()
	if x.full() || x.rounds[ex.id()] != nil { // A former round for the pod may still evict the rest of a group.
		x.mu.Unlock()
		return nil, time.Time{}, errFull
	}
	x.rounds[ex.id()] = ex
	x.mu.Unlock()
	if err := x.writeRecord(ctx); err != nil {
		x.end(ex)
		return nil, time.Time{}, err
	}
	evicted, err = x.evictLeft(ctx, ex)
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.rounds[ex.id()] != ex {
		return evicted, time.Time{}, err
	}
	return evicted, ex.until, err
}

// newExecution returns a round of which all pods are left.
func newExecution(r Round) *execution {
	ex := &execution{Round: r, left: map[gpu.PodUID]bool{}, justified: map[gpu.PodUID]bool{}}
	for _, v := range r.Victims {
		ex.justified[v.For.UID] = true
	}
	ex.reset()
	return ex
}

// reset makes all pods of the victims left. The caller holds the lock.
func (ex *execution) reset() {
	for _, v := range ex.Victims {
		for _, pod := range v.Pods {
			ex.left[pod.UID] = true
		}
	}
}

// id identifies the round.
func (r *Round) id() gpu.PodUID { return r.For[0].UID }

// evictLeft evicts the pods that are left, the first one alone: if its eviction fails and nothing was evicted before, none is.
func (x *Executor) evictLeft(ctx context.Context, ex *execution) (evicted []gpu.PodUID, err error) {
	x.mu.Lock()
	ex.state = calling
	begun, left := ex.begun() || !ex.lost.IsZero(), ex.removeUnwanted(x.Clock.Now())
	x.mu.Unlock()
	var mu sync.Mutex
	evict := func(v Victim, pod gpu.Pod) error {
		made, err := x.evictOne(ctx, ex, v, pod)
		mu.Lock()
		defer mu.Unlock()
		if made {
			evicted = append(evicted, pod.UID)
		}
		return err
	}
	if !begun && len(left) > 0 {
		first := &left[0]
		err = evict(*first, first.Pods[0].pod())
		if err != nil && !errors.Is(err, errEvictionLost) {
			x.end(ex)
			return evicted, err
		}
		first.Pods = first.Pods[1:]
	}
	others := x.forEach(left, evict)
	if err == nil {
		err = others
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	ex.state, ex.next = called, x.Clock.Now().Add(queue.Retry)
	return evicted, err
}

// evictOne evicts a pod of a round. made is false if the pod is gone.
func (x *Executor) evictOne(ctx context.Context, ex *execution, v Victim, pod gpu.Pod) (made bool, err error) {
	if err := x.Leading(); err != nil {
		return false, err
	}
	x.mu.Lock()
	ex.asked = x.Clock.Now() // Before the call, because its answer may be lost.
	x.mu.Unlock()
	ends, gone, err := x.request(ctx, pod)
	if err != nil {
		x.refuse(v, err)
		if apiserver.OutcomeOf(err) == apiserver.Unknown {
			x.lose(ex, pod.UID)
			err = fmt.Errorf("%w: %w", errEvictionLost, err)
		}
		return false, fmt.Errorf("evicting pod %s: %w", pod, err)
	}
	x.mu.Lock()
	ex.left[pod.UID] = false
	if end := ends.Add(queue.Arrival); end.After(ex.until) {
		ex.until = end
	}
	x.mu.Unlock()
	switch {
	case gone:
	case ex.Cause == ByShare:
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

// lose records that the answer to the eviction of a pod is lost. If the pod is one of a group, the others stay victims until it is known whether the
// eviction was made.
func (x *Executor) lose(ex *execution, uid gpu.PodUID) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !slices.ContainsFunc(ex.Victims, func(v Victim) bool {
		return len(v.Pods) > 1 && slices.ContainsFunc(v.Pods, func(pod PodID) bool { return pod.UID == uid })
	}) {
		return
	}
	ex.lost = ex.asked.Add(x.AnswerLost)
	if end := ex.lost.Add(queue.Arrival); end.After(ex.until) {
		ex.until = end
	}
}

// begun reports whether a pod of the victims was evicted. The caller holds the lock.
func (ex *execution) begun() bool {
	return slices.Contains(slices.Collect(maps.Values(ex.left)), false)
}

// unfinished reports whether a pod of the victims is left. The caller holds the lock.
func (ex *execution) unfinished() bool {
	return slices.Contains(slices.Collect(maps.Values(ex.left)), true)
}

// removeUnwanted returns the victims that are to be evicted now, with their pods that are left. It removes those whose pods don't wait any more. The
// rest of groups that are evicted in part would stay for ever, so it is evicted in any case, and a group that may be is kept until that is known. The
// caller holds the lock.
func (ex *execution) removeUnwanted(now time.Time) (victims []Victim) {
	for _, v := range ex.Victims {
		left := slices.DeleteFunc(slices.Clone(v.Pods), func(pod PodID) bool { return !ex.left[pod.UID] })
		justified, waits := ex.justified[v.For.UID]
		switch {
		case len(left) == 0:
		case len(left) < len(v.Pods) || justified:
			v.Pods = left
			victims = append(victims, v)
		case !waits && (len(v.Pods) == 1 || now.After(ex.lost)):
			for _, pod := range v.Pods {
				delete(ex.left, pod.UID)
			}
		}
	}
	return victims
}

// due ends rounds that are over, and returns those with pods that are to be evicted now.
func (x *Executor) due() (due []*execution) {
	x.mu.Lock()
	present := slices.Collect(maps.Values(x.rounds))
	wanted := make([]Wanted, len(present))
	for i, ex := range present {
		wanted[i] = ex.wanted
	}
	x.mu.Unlock()
	for i, ex := range present {
		var justified map[gpu.PodUID]bool
		if wanted[i] != nil {
			justified = wanted[i]() // Without the lock: it takes that of another part.
		}
		x.mu.Lock()
		now, over := x.Clock.Now(), false
		switch {
		case ex.state == calling, ex.state == inherited && !now.After(ex.next):
		case wanted[i] == nil && ex.wanted != nil: // Continue was called just now.
		case now.After(ex.until):
			over = true
		default:
			if !ex.lost.IsZero() && now.After(ex.lost) {
				x.inspect(ex)
			}
			ex.justified = justified
			left := len(ex.removeUnwanted(now))
			over = len(justified) == 0 && !ex.unfinished()
			if left > 0 && !now.Before(ex.next) {
				due = append(due, ex)
			}
		}
		x.mu.Unlock()
		if over {
			x.end(ex)
		}
	}
	slices.SortFunc(due, func(a, b *execution) int { return cmp.Or(a.next.Compare(b.next), cmp.Compare(a.id(), b.id())) })
	return due
}

// end ends a round.
func (x *Executor) end(ex *execution) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.rounds[ex.id()] == ex {
		delete(x.rounds, ex.id())
		x.unwritten = true
	}
}

// inherit reads the rounds of the former leader.
func (x *Executor) inherit(ctx context.Context) error {
	rounds, err := x.readRecord(ctx)
	if err != nil {
		x.Observer.EvictionRecordFailed()
		return err
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, r := range rounds {
		if !r.Began.IsZero() && x.Clock.Since(r.Began) > outdatedAfter {
			x.unwritten = true
			continue
		}
		ex := newExecution(r)
		// An eviction of the former leader whose answer is lost can still be made.
		ex.state, ex.next = inherited, x.Clock.Now().Add(max(queue.Arrival, x.AnswerLost))
		ex.until, ex.lost = ex.next.Add(queue.Arrival), ex.next
		x.rounds[r.id()] = ex
	}
	x.read, x.again = true, time.Time{}
	return nil
}

// inspect finds out from the cache which pods aren't left. While it lags, it can lack pods that run: of a former leader's round, these are left once
// it has them. The caller holds the lock.
func (x *Executor) inspect(ex *execution) {
	if ex.state == inherited {
		ex.reset()
	}
	for _, v := range ex.Victims {
		for _, pod := range v.Pods {
			info, known := x.Cache.Pod(pod.Namespace, pod.Name)
			known = known && info.UID == pod.UID
			if known && !info.LeavesSoon() && !info.Ended {
				continue
			}
			ex.left[pod.UID] = false
			if known && info.DeletionTime.Add(queue.Arrival).After(ex.until) {
				ex.until = info.DeletionTime.Add(queue.Arrival)
			}
		}
	}
}

// Inherited returns the rounds of a former leader that await Continue. Of each, a victim was evicted.
func (x *Executor) Inherited(cause Cause) (rounds []Round) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, r := range x.present() {
		ex := x.rounds[r.id()]
		if ex.state != inherited || r.Cause != cause {
			continue
		}
		x.inspect(ex)
		if ex.begun() {
			rounds = append(rounds, r)
		}
	}
	return rounds
}

// Continue goes on with a round of a former leader, as long as it is wanted. Its places must be reserved. Which victims run is read from the API
// server again before they are evicted. It returns the end of the round; zero if there is no such round any more.
func (x *Executor) Continue(r Round, wanted Wanted) (until time.Time) {
	x.mu.Lock()
	defer x.mu.Unlock()
	ex := x.rounds[r.id()]
	if ex == nil || ex.state != inherited {
		return time.Time{}
	}
	ex.reset()
	ex.wanted, ex.state, ex.next = wanted, called, x.Clock.Now()
	return ex.until
}

// Tries reports whether the pod is a victim of a round and its deletion may not be visible yet.
func (x *Executor) Tries(uid gpu.PodUID) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, ex := range x.rounds {
		if left, victim := ex.left[uid]; victim && (left || x.Clock.Since(ex.asked) <= x.AnswerLost) {
			return true
		}
	}
	return false
}

// mayEvict reports whether the eviction of a pod with these budgets is likely to be made: the API server evicts no pod with several budgets
// (k8s.io/kubernetes pkg/registry/core/pod/storage/eviction.go), may refuse again what it refused a short time ago, and a victim of another round
// isn't one of this.
func (x *Executor) mayEvict(uid gpu.PodUID, budgets []int) bool {
	if len(budgets) > 1 || x.Tries(uid) {
		return false
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return !x.spared.Has(uid, x.Clock.Now())
}

// Full reports whether no further round can begin now: there are too many, or those of the former leader aren't known yet.
func (x *Executor) Full() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.full()
}

func (x *Executor) full() bool { return !x.read || len(x.rounds) >= maxRounds }

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

package scheduling

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"time"

	"k8s.io/utils/clock"
)

// world is a simulated cluster: an API server, a kube-scheduler, controllers, kubelets, and the extenders, which are real
// Schedulers. It runs in one goroutine on a virtual clock. All that is random comes from one seed, so that a run can be repeated.
type world struct {
	worldOptions
	seed   uint64
	random *rand.Rand
	// now is the time since begin.
	now    time.Duration
	events []event
	serial uint64
	// steps counts the events that were handled, without the rounds of loops that are always there.
	steps int
	// violation is the first invariant that didn't hold; empty if all did.
	violation string
	// kind is the kind of the violation, item what it is about.
	kind violationKind
	item *item
	// ingredients are what the world is made of, if it was drawn from ingredients.
	ingredients []string
	// part is the ingredient to which the jobs belong that are submitted now.
	part     string
	liveness *liveness
	// diesAtEviction is the probability that the leader dies after an eviction for another pod.
	diesAtEviction float64
	// boot is how long an autoscaler takes to add a node, 0 if there is none.
	boot time.Duration
	// history are the latest traces, if traces are on.
	history []string
	tracing bool
	// closing is true while the tasks are ended.
	closing bool

	// current is the task that runs now; nil outside of tasks.
	current *task
	// idle are tasks without work.
	idle []*task
	all  []*task

	api       *apiServer
	scheduler *kubeScheduler
	replicas  []*replica
	jobs      []*job
	faults    faults
	// fate decides the outcome of a Binding in scenes; nil for a random one.
	fate func(pod string) fate
	// terms counts the extenders that have begun to lead.
	terms int
	// latestBind is when a pod was bound last.
	latestBind time.Duration
	// calm is true once the disturbances are over.
	calm bool
	// blind is until when an extender may have known less than the API server.
	blind    time.Duration
	final    string
	stats    stats
	reserved reservedTime
}

// worldOptions are the properties of a cluster that don't change during a run.
type worldOptions struct {
	// replicas is the number of extenders; 1 for a sole extender without leader election.
	replicas       int
	hold, patience time.Duration
	// maxIdle is ReservationOptions.MaxIdle.
	maxIdle float64
	// maxAge is ReservationOptions.MaxAge.
	maxAge     time.Duration
	maxBackoff time.Duration
	// popFromBackoff lets kube-scheduler try pods before their back-off is over if no other pod waits.
	popFromBackoff bool
	keepPartial    bool
	// mixed has nodes of all kinds and pods that ask for more than memory, see simulation_cards_test.go.
	mixed bool
	// slow is how many times as long as usual kube-scheduler's cycles take, if it isn't 0: then pods queue.
	slow int
	// sample is the number of feasible nodes at which kube-scheduler stops looking for more; 0 if it evaluates all nodes.
	sample int
	fair   fairSharing
	// brisk has many pods at a time that last for seconds, so that binds are frequent.
	brisk bool
	// brownouts are those of brisk worlds in which no Binding arrives for longer than its deadline. Pods come when their retries are due.
	brownouts bool
	// bindWindow is the longest time for which the extender collects binds.
	bindWindow time.Duration
	// fragmented lets the extender evict pods of lower priority for pods that only fragmentation keeps pending.
	fragmented bool
	// overruns has pods that use more memory than they request, for which the extender evicts them.
	overruns bool
}

// stats counts what happened, to show that the simulation reaches the states that it is for.
type stats struct {
	binds, lost, rejected, singles, whole, evictions, evicted, preempted, leaders, restarts int
	// opened counts the gates that were removed, reclaimed the pods that were evicted for other tenants.
	opened, reclaimed int
	// reclaimedFrom are those by tenant.
	reclaimedFrom map[string]int
	// overruns counts the pods that were evicted for their use, twice the preemptions for pods whose earlier victims had not ended.
	overruns, twice int
	// protected counts the evictions that a disruption budget refused.
	protected int
	// nominated counts the nominations to nodes outside samples, taken those whose nodes passed.
	nominated, taken int
	failed           map[string]int
	// cards counts what only mixed worlds have.
	cards map[string]int
	// outcomes counts the evictions for other pods by what became of these.
	outcomes map[string]int
	// known has the seeds that show known defects.
	known map[*knownDefect][]uint64
}

const (
	simBindTimeout = 3 * time.Second
	httpTimeout    = 15 * time.Second
)

func newWorld(seed uint64, o worldOptions) *world {
	w := &world{worldOptions: o, seed: seed, random: rand.New(rand.NewPCG(seed, 15)), stats: stats{failed: map[string]int{}, reclaimedFrom: map[string]int{}, cards: map[string]int{}}}
	w.maxAge = cmp.Or(w.maxAge, time.Hour)
	w.api = newAPIServer(w)
	w.scheduler = newKubeScheduler(w)
	return w
}

// fail records that an invariant doesn't hold. The run ends after the current event.
func (w *world) fail(format string, args ...any) {
	if w.violation == "" {
		w.violation = fmt.Sprintf("at %v, step %d: ", w.now, w.steps) + fmt.Sprintf(format, args...)
		w.trace("VIOLATION: %s", w.violation)
	}
}

// violate records that an invariant of liveness doesn't hold.
func (w *world) violate(kind violationKind, i *item, format string, args ...any) {
	if w.violation == "" {
		w.kind, w.item = kind, i
		w.fail("%s: %s", kind, fmt.Sprintf(format, args...))
	}
}

// maxHistory limits the traces that a failure prints.
var maxHistory = int(envInt("GPUSHARE_SIM_TRACE", 400))

// trace records what happens, for the report of a failure.
func (w *world) trace(format string, args ...any) {
	if !w.tracing {
		return
	}
	if len(w.history) >= 2*maxHistory {
		w.history = append(w.history[:0], w.history[maxHistory:]...)
	}
	w.history = append(w.history, fmt.Sprintf("%10.3fs ", w.now.Seconds())+fmt.Sprintf(format, args...))
}

// chance returns true with the probability.
func (w *world) chance(p float64) bool { return p > 0 && w.random.Float64() < p }

// between returns a random duration.
func (w *world) between(low, high time.Duration) time.Duration {
	return low + time.Duration(w.random.Int64N(int64(high-low)+1))
}

// event is an event of the virtual clock. seq orders events of the same time.
type event struct {
	at  time.Duration
	seq uint64
	run func()
}

func (e *event) before(o *event) bool {
	return cmp.Or(cmp.Compare(e.at, o.at), cmp.Compare(e.seq, o.seq)) < 0
}

// after lets run be called once the time has passed.
func (w *world) after(d time.Duration, run func()) {
	w.serial++
	w.events = append(w.events, event{w.now + max(d, 0), w.serial, run})
	i := len(w.events) - 1
	for i > 0 && w.events[i].before(&w.events[(i-1)/2]) {
		w.events[i], w.events[(i-1)/2] = w.events[(i-1)/2], w.events[i]
		i = (i - 1) / 2
	}
}

// next removes and returns the earliest event.
func (w *world) next() event {
	first, last := w.events[0], len(w.events)-1
	w.events[0], w.events[last] = w.events[last], event{}
	w.events = w.events[:last]
	for i := 0; ; {
		child := 2*i + 1
		if child+1 < last && w.events[child+1].before(&w.events[child]) {
			child++
		}
		if child >= last || w.events[i].before(&w.events[child]) {
			return first
		}
		w.events[i], w.events[child] = w.events[child], w.events[i]
		i = child
	}
}

// runFor handles the events of the next time span, until an invariant fails.
func (w *world) runFor(d time.Duration) { w.runUntil(d, func() bool { return false }) }

// runUntil handles events until the condition is true; it returns false after the time span.
func (w *world) runUntil(d time.Duration, done func() bool) bool {
	end := w.now + d
	for w.violation == "" && len(w.events) > 0 && w.events[0].at <= end {
		e := w.next()
		w.now = e.at
		w.steps++
		e.run()
		w.decideHeld()
		if done() {
			return true
		}
	}
	if w.violation == "" {
		w.now = end
	}
	return false
}

// close ends all tasks.
func (w *world) close() {
	w.closing = true
	for _, r := range w.replicas {
		r.dead = true
	}
	for _, t := range w.all {
		w.current = t
		t.stop()
	}
}

// task runs code that waits for virtual time, in a coroutine.
type task struct {
	w     *world
	owner *replica
	work  func()
	next  func() (time.Duration, bool)
	stop  func()
	yield func(time.Duration) bool
	// parked is true while the task waits for wake.
	parked bool
}

const (
	// idleTask and parkedTask are yielded by tasks that have no work, or that wait for wake.
	idleTask time.Duration = -1 - iota
	parkedTask
)

// start runs the work until it first waits. It is a part of the replica's process, and stops while that is frozen.
func (w *world) start(owner *replica, work func()) *task {
	var t *task
	if n := len(w.idle); n > 0 {
		t, w.idle = w.idle[n-1], w.idle[:n-1]
	} else {
		t = &task{w: w}
		t.next, t.stop = iter.Pull(iter.Seq[time.Duration](func(yield func(time.Duration) bool) {
			t.yield = yield
			for more := true; more && !t.w.closing; more = yield(idleTask) {
				t.work()
			}
		}))
		w.all = append(w.all, t)
	}
	t.owner, t.work, t.parked = owner, work, false
	t.resume()
	return t
}

func (t *task) resume() {
	if t.owner != nil && t.owner.frozenUntil > t.w.now {
		t.w.after(t.owner.frozenUntil-t.w.now, t.resume)
		return
	}
	before := t.w.current
	t.w.current = t
	pause, _ := t.next()
	t.w.current = before
	switch pause {
	case idleTask:
		t.owner, t.work = nil, nil
		t.w.idle = append(t.w.idle, t)
	case parkedTask:
		t.parked = true
	default:
		t.w.after(pause, t.resume)
	}
}

// sleep lets time pass in the current task.
func (w *world) sleep(d time.Duration) {
	if w.closing {
		w.now += max(d, 0)
		return
	}
	w.current.yield(max(d, 0))
}

// park waits until the task is woken.
func (w *world) park() {
	if !w.closing {
		w.current.yield(parkedTask)
	}
}

// wake resumes a parked task.
func (t *task) wake() {
	if t.parked {
		t.parked = false
		t.w.after(0, t.resume)
	}
}

// virtualClock is the clock of a world.
type virtualClock struct{ w *world }

func (c virtualClock) Now() time.Time                  { return begin.Add(c.w.now) }
func (c virtualClock) Since(t time.Time) time.Duration { return c.Now().Sub(t) }

// After waits in the current task and returns a channel that is ready.
func (c virtualClock) After(d time.Duration) <-chan time.Time {
	c.w.sleep(d)
	ready := make(chan time.Time, 1)
	ready <- c.Now()
	return ready
}

func (c virtualClock) NewTimer(time.Duration) clock.Timer   { panic("no timers in a simulation") }
func (c virtualClock) NewTicker(time.Duration) clock.Ticker { panic("no tickers in a simulation") }
func (c virtualClock) Sleep(d time.Duration)                { c.w.sleep(d) }

func (c virtualClock) Tick(time.Duration) <-chan time.Time { panic("no tickers in a simulation") }

// virtualContext ends at a time of the virtual clock. Nothing waits for it.
type virtualContext struct {
	context.Context
	w        *world
	deadline time.Duration
}

func (c virtualContext) Err() error {
	if c.w.now >= c.deadline {
		return context.DeadlineExceeded
	}
	return nil
}

// virtualDeadline is the key of a context's value that is its deadline by the virtual clock.
type virtualDeadline struct{}

func (c virtualContext) Value(key any) any {
	if key == (virtualDeadline{}) {
		return c.deadline
	}
	return c.Context.Value(key)
}

// left returns how much virtual time is left until the context ends. Deadlines by the real clock don't count: how long a world takes must not
// change what happens in it.
func (w *world) left(ctx context.Context) time.Duration {
	if deadline, limited := ctx.Value(virtualDeadline{}).(time.Duration); limited {
		return deadline - w.now
	}
	return math.MaxInt64
}

// pass lets time pass in the current task, until the context ends.
func (w *world) pass(ctx context.Context, d time.Duration) error {
	left := w.left(ctx)
	w.sleep(min(d, left))
	if d >= left {
		return context.DeadlineExceeded
	}
	return nil
}

// withTimeout is context.WithTimeout for the virtual clock.
func (w *world) withTimeout(parent context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return virtualContext{parent, w, w.now + d}, func() {}
}

package scheduling

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/sampling"
	"github.com/gpushare/gpushare/test/fake"
)

// replica is the process of an extender: a real Scheduler whose loops the world runs.
type replica struct {
	w         *world
	name      string
	scheduler *Scheduler
	cache     *simCache
	// leads is true between the end of TakeOver and the end of the term; always for a sole extender.
	leads bool
	dead  bool
	// frozenUntil is until when the process doesn't run, apart until when it can't reach the API server.
	frozenUntil, apart time.Duration
	calls              []*bindCall
	held               []*bindCall
	// requeuing and evicting are true while a round runs. verifying and members count the reads and evictions of a Manager that run.
	requeuing, evicting bool
	verifying, members  int
	// reserved has the memory that members keep without a bind.
	reserved map[gpu.PodUID]*reservation
}

// bindCall is a bind call of kube-scheduler.
type bindCall struct {
	request BindRequest
	done    func(error)
	// over is true once kube-scheduler has the answer, or has abandoned the call.
	over bool
	held *gang.Permit
	task *task
}

func (w *world) context() context.Context { return context.Background() }

// newReplica starts an extender, whose cache holds the present state.
func (w *world) newReplica(name string) *replica {
	r := &replica{w: w, name: name, reserved: map[gpu.PodUID]*reservation{}}
	r.cache = newSimCache(r)
	o := Options{
		API: client{r}, Recorder: recorder{r}, Observer: &fake.Observer{}, CardPolicy: placement.Binpack, NodePolicy: placement.NodePolicies()[0],
		BindTimeout: simBindTimeout, BindWindow: w.bindWindow, Clock: virtualClock{w}, FilterBest: int(w.seed % 2), FilterBestAbove: 32,
		newGroup: r.newGroup, EvictFragmented: w.fragmented, EvictOverusers: w.overruns, FairShare: w.fair.options(w),
		Reservations: ReservationOptions{MaxIdle: w.maxIdle, MaxAge: w.maxAge},
		Gangs:        GangOptions{Hold: w.hold, Patience: w.patience, OnFailure: gang.Evict, Observer: gangObserver{&fake.Observer{}, w}},
	}
	if w.keepPartial {
		o.Gangs.OnFailure = gang.Keep
	}
	if w.worldOptions.replicas > 1 {
		o.Leading = r.leading
	} else {
		r.leads = true
		w.terms++
	}
	if o.minSample = w.sample; w.sample > 0 {
		o.SampleSize = func(int) int { return w.sample }
	}
	var err error
	if r.scheduler, err = newScheduler(o, r.cache); err != nil {
		panic(err)
	}
	if r.scheduler.nominator != nil {
		w.after(w.between(0, sampling.TickInterval), r.nominate)
	}
	if r.scheduler.fair != nil {
		r.beginFairSharing()
	}
	r.scheduler.withTimeout = w.withTimeout
	r.scheduler.groups.evictor, r.scheduler.groups.verifier = r, r
	r.scheduler.groups.manager.IllegalMove = func(move string) { w.fail("%s", move) }
	r.cache.list()
	r.cache.handler.Synced()
	w.replicas = append(w.replicas, r)
	w.after(w.between(0, tickInterval), r.tick)
	w.after(w.between(0, waitingInterval), r.await)
	w.after(w.between(0, time.Second), r.second)
	w.after(w.between(0, 500*time.Millisecond), r.resolve)
	if w.overruns {
		w.after(w.between(0, 5*time.Second), r.checkUse)
	}
	return r
}

// leading is Options.Leading.
func (r *replica) leading() error {
	if r.dead || !r.leads || r.frozenUntil > r.w.now {
		return errStandby
	}
	return nil
}

// answering returns the extender that kube-scheduler's calls reach; nil if there is none.
func (w *world) answering() *replica {
	for _, r := range w.replicas {
		if !r.dead && r.leads {
			return r
		}
	}
	return nil
}

// runs reports whether a loop of the process has its turn now, which counts as no step. While the process is frozen, the turn comes later.
func (r *replica) runs(turn func()) bool {
	r.w.steps--
	if !r.dead && r.frozenUntil > r.w.now {
		r.w.after(r.frozenUntil-r.w.now, turn)
		return false
	}
	return !r.dead
}

// tick is the loop of the groups.
func (r *replica) tick() {
	if !r.runs(r.tick) {
		return
	}
	r.scheduler.groups.tick()
	r.w.after(tickInterval, r.tick)
}

// await is the loop of the awaited reservations.
func (r *replica) await() {
	if !r.runs(r.await) {
		return
	}
	r.scheduler.waiting.tick()
	r.w.after(waitingInterval, r.await)
}

// nominate is the loop of the nominations.
func (r *replica) nominate() {
	if !r.runs(r.nominate) {
		return
	}
	r.scheduler.nominator.Tick(r.w.context())
	r.w.after(sampling.TickInterval, r.nominate)
}

// resolve is the loop that reads the pods of unconfirmed binds.
func (r *replica) resolve() {
	if !r.runs(r.resolve) {
		return
	}
	r.w.start(r, func() {
		r.scheduler.binder.Resolve(r.w.context())
		r.w.after(500*time.Millisecond, r.resolve)
	})
}

// second runs the other loops.
func (r *replica) second() {
	if !r.runs(r.second) {
		return
	}
	if w := r.w; w.sample > 0 && r.leading() == nil {
		r.scheduler.requeue.RetrySamples()
	}
	r.scheduler.expectations.expectIfDue(r.w.context())
	if !r.requeuing {
		r.requeuing = true
		r.w.start(r, func() {
			r.scheduler.requeue.Requeue(r.w.context())
			r.requeuing = false
		})
	}
	if !r.evicting {
		r.evicting = true
		r.w.start(r, func() {
			if r.scheduler.evictsForOthers() {
				r.scheduler.executor.Tick(r.w.context())
			}
			r.scheduler.preemptors.Tick(r.w.context())
			r.evicting = false
		})
	}
	r.w.checkLedger(r)
	r.w.after(time.Second, r.second)
}

// Evict makes the evictions that a Manager requests, unless earlier ones have not ended.
func (r *replica) Evict(pods []gpu.Pod) {
	if r.members > 0 {
		return
	}
	for _, pod := range pods {
		r.members++
		r.w.start(r, func() {
			r.scheduler.members.EvictMember(context.WithValue(r.w.context(), reasonKey{}, forBrokenRun), pod)
			r.members--
		})
	}
}

// Verify makes the reads that a Manager requests, unless earlier ones have not ended.
func (r *replica) Verify(pods []gpu.Pod) {
	if r.verifying > 0 {
		return
	}
	for _, pod := range pods {
		r.verifying++
		r.w.start(r, func() {
			r.scheduler.binder.VerifyPod(r.w.context(), pod)
			r.verifying--
		})
	}
}

// bind handles a bind call.
func (r *replica) bind(call *bindCall) {
	r.calls = append(r.calls, call)
	r.w.start(r, func() {
		err := r.bindPermitted(call)
		if !r.dead {
			r.calls = slices.DeleteFunc(r.calls, func(o *bindCall) bool { return o == call })
			call.done(err)
		}
	})
}

// bindPermitted is Scheduler.Bind with a wait of the virtual clock.
func (r *replica) bindPermitted(call *bindCall) error {
	s, uid := r.scheduler, gpu.PodUID(call.request.UID)
	s.requeue.BindStarted(uid)
	if pod, known := s.cachedPod(call.request); !known || pod.Node != "" || s.groups.memberOf(pod) == nil {
		_, err := s.bindClaimed(r.w.context(), call.request, permit{deadline: s.Clock.Now().Add(s.BindTimeout)})
		return err
	}
	_, waits := s.groups.manager.Status(uid) // A member that joins a run later is bound alone: if there is no room after all, no other one is affected.
	held, err := s.groups.arrive(r.w.context(), uid, call.request.Node)
	if err != nil {
		return err
	}
	call.held, call.task = held, r.w.current
	r.w.moment()
	if !isDecided(held) {
		r.held = append(r.held, call)
		r.w.park()
	}
	if !isDecided(held) { // It was cancelled.
		return errLost
	}
	p, err := s.groups.outcome(held)
	if err != nil {
		return err
	}
	if waits && held.OpenedAt.Equal(s.Clock.Now()) { // Later, for the last member, it is too late to give the place up.
		r.w.checkPromise(r, call.request)
	}
	_, err = s.bindClaimed(r.w.context(), call.request, p)
	return err
}

func isDecided(held *gang.Permit) bool {
	select {
	case <-held.Decided:
		return true
	default:
		return false
	}
}

// cancel handles the end of a call that kube-scheduler has abandoned.
func (r *replica) cancel(call *bindCall) {
	r.w.start(r, func() { r.cancelled(call) })
}

func (r *replica) cancelled(call *bindCall) {
	if i := slices.Index(r.held, call); i >= 0 && !r.dead && !isDecided(call.held) {
		if r.scheduler.groups.manager.CancelPermit(gpu.PodUID(call.request.UID), call.held, r.scheduler.groups.clock.Now()) {
			r.w.trace("%s: the held bind of %s is cancelled", r.name, call.request.Name)
		}
	}
}

// decideHeld continues the held binds whose permit was decided.
func (w *world) decideHeld() {
	for _, r := range w.replicas {
		if len(r.held) == 0 {
			continue
		}
		r.held = slices.DeleteFunc(r.held, func(call *bindCall) bool {
			if !r.dead && !isDecided(call.held) {
				return false
			}
			call.task.wake()
			return true
		})
	}
}

// kill ends the process. Its writes that are under way go on.
func (r *replica) kill() {
	r.dead, r.leads, r.cache.watch.closed = true, false, true
	r.w.replicas = slices.DeleteFunc(r.w.replicas, func(o *replica) bool { return o == r })
	for _, call := range r.held {
		call.task.wake()
	}
	for _, call := range r.calls {
		r.w.after(5*time.Millisecond, func() { call.done(errLost) }) // The connection is closed.
	}
	r.held, r.calls = nil, nil
	r.w.trace("%s is killed", r.name)
}

// simCache is the pod cache of one extender, which a watcher keeps up to date. It implements clusterCache.
type simCache struct {
	r       *replica
	watch   *watcher
	handler clustercache.Handler
	pods    map[string]*clustercache.PodInfo
	byNode  map[string][]*clustercache.PodInfo
	pending map[gpu.PodUID]*clustercache.PodInfo
	// since is when each pending pod was first reported without a gate.
	since   map[gpu.PodUID]time.Duration
	nodes   []*corev1.Node
	budgets map[*budget]*policyv1.PodDisruptionBudget
}

func newSimCache(r *replica) *simCache {
	c := &simCache{
		r: r, pods: map[string]*clustercache.PodInfo{}, byNode: map[string][]*clustercache.PodInfo{}, pending: map[gpu.PodUID]*clustercache.PodInfo{},
		since: map[gpu.PodUID]time.Duration{}, budgets: map[*budget]*policyv1.PodDisruptionBudget{},
	}
	c.watch = r.w.api.watch(r, 20*time.Millisecond, c.observe)
	return c
}

// list applies the difference to the API server's present state, as a watch does that begins again.
func (c *simCache) list() {
	c.watch.next = c.r.w.api.base + len(c.r.w.api.log)
	for _, n := range c.r.w.api.nodes {
		if n.exists {
			c.observe(change{node: n, spec: n.object})
		} else {
			c.observe(change{node: n})
		}
	}
	for _, b := range c.r.w.api.budgets {
		c.budgets[b] = b.object
	}
	pods := slices.Clone(c.r.w.api.order) // An informer passes them on in any order.
	c.r.w.random.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	for _, p := range pods {
		if p.exists {
			if known := c.pods[p.name()]; known != p.info {
				c.observe(change{pod: p, info: p.info, object: p.object})
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.pods)) {
		if c.r.w.api.pods[name] == nil {
			c.observe(change{info: c.pods[name], gone: true})
		}
	}
}

func (c *simCache) observe(e change) {
	switch {
	case e.touched:
		return
	case e.budget != nil:
		c.budgets[e.budget] = e.disruptions
		return
	case e.node != nil:
		c.observeNode(e)
		return
	}
	old := c.pods[e.info.Name]
	if old != nil {
		c.unindex(old)
	}
	if e.gone {
		delete(c.since, e.info.UID)
		if old != nil && old.UID == e.info.UID {
			delete(c.pods, e.info.Name)
			c.handler.PodDeleted(old)
		} else if old != nil {
			c.index(old)
		}
		return
	}
	c.pods[e.info.Name] = e.info
	c.index(e.info)
	c.handler.PodUpdated(old, e.info)
}

func (c *simCache) index(p *clustercache.PodInfo) {
	if p.Pending != nil {
		c.pending[p.UID] = p
		if _, known := c.since[p.UID]; !known && !p.Gated {
			c.since[p.UID] = c.r.w.now
		}
	}
	node := p.Node
	if node == "" {
		node = p.NominatedNode
	}
	if !p.Ended && node != "" {
		c.byNode[node] = append(c.byNode[node], p)
	}
}

func (c *simCache) unindex(p *clustercache.PodInfo) {
	delete(c.pending, p.UID)
	node := p.Node
	if node == "" {
		node = p.NominatedNode
	}
	if node != "" {
		c.byNode[node] = slices.DeleteFunc(c.byNode[node], func(o *clustercache.PodInfo) bool { return o == p })
	}
}

func (c *simCache) observeNode(e change) {
	i := slices.IndexFunc(c.nodes, func(n *corev1.Node) bool { return n.Name == e.node.name })
	switch {
	case e.spec == nil && i >= 0:
		c.nodes = slices.Delete(c.nodes, i, i+1)
		c.handler.NodeDeleted(e.node.name)
	case e.spec == nil:
	case i >= 0:
		if c.nodes[i] != e.spec {
			c.nodes[i] = e.spec
			c.handler.NodeUpdated(e.spec)
		}
	default:
		c.nodes = append(c.nodes, e.spec)
		c.handler.NodeUpdated(e.spec)
	}
}

func (c *simCache) AddHandler(h clustercache.Handler) error {
	c.handler = h
	return nil
}

func (c *simCache) Run(context.Context) error                  { return nil }
func (c *simCache) Ready() error                               { return nil }
func (c *simCache) AwaitReady(context.Context) error           { return nil }
func (c *simCache) BudgetsSynced() bool                        { return true }
func (c *simCache) PodsOn(node string) []*clustercache.PodInfo { return slices.Clone(c.byNode[node]) }
func (c *simCache) Reported() []*clustercache.PodInfo          { return nil }
func (c *simCache) Nodes() []*corev1.Node                      { return c.nodes }
func (c *simCache) WatchVersions() map[string]uint64           { return nil }
func (c *simCache) RequestProblems() []*clustercache.PodInfo   { return nil }
func (c *simCache) Pod(_, name string) (*clustercache.PodInfo, bool) {
	p, ok := c.pods[name]
	return p, ok
}
func (c *simCache) PendingPod(uid gpu.PodUID) (*clustercache.PodInfo, bool) {
	p, ok := c.pending[uid]
	return p, ok
}
func (c *simCache) PendingFor(uid gpu.PodUID) time.Duration {
	if _, pending := c.pending[uid]; !pending {
		return 0
	}
	return c.r.w.now - c.since[uid]
}
func (c *simCache) Node(name string) (*corev1.Node, bool) {
	i := slices.IndexFunc(c.nodes, func(n *corev1.Node) bool { return n.Name == name })
	if i < 0 {
		return nil, false
	}
	return c.nodes[i], true
}

func (c *simCache) Pending() []*clustercache.PodInfo {
	return slices.SortedFunc(maps.Values(c.pending), func(a, b *clustercache.PodInfo) int { return cmp.Compare(a.UID, b.UID) })
}

// gangObserver counts what happens to groups.
type gangObserver struct {
	*fake.Observer
	w *world
}

func (o gangObserver) GangFailed(reason reasons.Group) {
	o.w.stats.failed[reasons.GroupFailures[reason]]++
}
func (o gangObserver) GangEvicted() { o.w.stats.evicted++ }

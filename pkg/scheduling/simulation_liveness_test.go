package scheduling

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
)

// This file checks that what fits gets its turn, whatever others do, and that no running pod is ended for what doesn't run. What can't start for a
// reason that the extender doesn't see may cost others their places, but not again within queue.LongestPause.
//
// An item is what has to run at once: a pod, or the members that a group's run needs. It is entitled to run while it would fit beside the
// pods that stay for long, and, with fair sharing, while its tenant has less than it gets in any case. If n-1 items come before it, it must
// have been bound before it was entitled for n·(4L+2c): L is how long other pods run, c how long kube-scheduler and the extender take to
// place a pod. Only a quiet cluster counts, without the time after disturbances in which pauses end, without a pause that the item shares with a pod
// that can't start, and without the time in which memory is reserved for an item before it because a pod that stays may still be one that ends.

// violationKind distinguishes violations of liveness from those of safety, which is the zero value.
type violationKind string

const (
	// starved: an item wasn't bound within its bound.
	starved violationKind = "starved"
	// inPart: members hold memory, and the item isn't whole for longer than its bound.
	inPart violationKind = "bound in part"
	// wasted: pods were evicted for an item that didn't run.
	wasted violationKind = "evicted for nothing"
)

// itemKey identifies an item: a pod, or the pods of one generation of a group's job.
type itemKey struct {
	pod        gpu.PodUID
	job        *job
	generation int
}

// item is what has to run at once.
type item struct {
	itemKey
	name   string
	tenant string
	// part is the ingredient to which it belongs.
	part string
	// pods are its pods that exist and haven't ended, need is how many of them have to be bound.
	pods []*apiPod
	need int
	// entered is when it began to wait with all of its pods, 0 if it doesn't wait; waited is for how long it was entitled since.
	entered, waited time.Duration
	// paused is for how long it may have shared a pause meanwhile.
	paused time.Duration
	// before counts the items that come before it.
	before int
	// ran is true if it has been bound whole, evicted if members of it were evicted since.
	ran, evicted bool
	// halved is for how long it has been bound in part.
	halved time.Duration
	// fitted is when the latest check whether it fits was made, and fits its result.
	fitted time.Duration
	fits   bool
	// seen is when it was checked last.
	seen time.Duration
}

// liveness checks the items of a world.
type liveness struct {
	w     *world
	items map[itemKey]*item
	// order has the items in the order in which they were seen first.
	order []*item
	// longest is the longest time for which a pod runs that doesn't run for ever.
	longest time.Duration
	// takesCPU is true if there are pods without GPU memory.
	takesCPU bool
	// quiet is since when nothing was disturbed.
	quiet     time.Duration
	evictions []*evictionFor
	// unseen is when a victim of the latest evictions was gone that were for pods which can't start for reasons that the extender doesn't see.
	// Those of a world are all alike.
	unseen time.Duration
	counts map[string]int
}

// evictionFor is an eviction for an item.
type evictionFor struct {
	victim string
	item   itemKey
	name   string
	at     time.Duration
	// gone is when the victim's pod was gone; 0 before. victimPod is the victim.
	victimPod *apiPod
	gone      time.Duration
	// pod is the one for which it was evicted.
	pod *apiPod
}

const (
	// livenessInterval is the time between two looks at the items.
	livenessInterval = 10 * time.Second
	// recovery is how long after a disturbance pauses may last.
	recovery = 12 * time.Minute
	// runsWithin is how long after its victims are gone an item must run.
	runsWithin = 10 * time.Minute
)

// watchLiveness begins to look at the items, again and again.
func (w *world) watchLiveness() {
	w.liveness = &liveness{w: w, items: map[itemKey]*item{}, counts: map[string]int{}}
	w.after(livenessInterval, w.liveness.look)
}

// disturbed records that something was disturbed now.
func (w *world) disturbed() {
	if w.liveness != nil {
		w.liveness.quiet = w.now
	}
}

// keyOf returns the item that the pod belongs to, and how many pods it needs. The pods of a Deployment's rollout come one by one.
func keyOf(p *apiPod) (key itemKey, need int) {
	if p.group == "" || p.job == nil {
		return itemKey{pod: p.uid()}, 1
	}
	if d, ok := p.job.controller.(*deployment); ok && p.generation > 0 && !d.recreate {
		return itemKey{pod: p.uid()}, 1
	}
	return itemKey{job: p.job, generation: p.generation}, p.size
}

// look updates all items, and checks them.
func (l *liveness) look() {
	w := l.w
	w.steps--
	w.after(livenessInterval, l.look)
	l.gather()
	usable := l.usable()
	for _, i := range l.order {
		if i.seen == w.now {
			l.check(i, usable)
		}
	}
	l.checkEvictions(usable)
	l.order = slices.DeleteFunc(l.order, func(i *item) bool {
		if i.seen < w.now-time.Hour {
			delete(l.items, i.itemKey)
			return true
		}
		return false
	})
}

// usable reports whether the time counts: extender, kube-scheduler and API server work, and have for some time.
func (l *liveness) usable() bool {
	return l.w.answering() != nil && l.w.now > l.quiet+recovery || l.quiet == 0 && l.w.answering() != nil
}

// gather finds the items of all pods.
func (l *liveness) gather() {
	for _, p := range l.w.api.order {
		if p.exists && p.memory == 0 {
			l.takesCPU = true
		}
		if !p.exists || p.memory == 0 || p.info.Ended {
			continue
		}
		l.longest = max(l.longest, p.lasts)
		key, need := keyOf(p)
		i := l.items[key]
		if i == nil {
			i = &item{itemKey: key, name: p.name(), tenant: p.tenant}
			if p.job != nil {
				i.part = p.job.part
			}
			if p.group != "" {
				i.name = fmt.Sprintf("group %s of %d (generation %d)", p.group, p.size, p.generation)
			}
			l.items[key] = i
			l.order = append(l.order, i)
		}
		if i.seen != l.w.now {
			i.pods, i.seen, i.need = i.pods[:0], l.w.now, need
		}
		i.pods = append(i.pods, p)
	}
}

// check checks one item.
func (l *liveness) check(i *item, usable bool) {
	w := l.w
	bound, waits := 0, []*apiPod{}
	for _, p := range i.pods {
		switch {
		case p.live() && !p.info.Leaving:
			bound++
		case p.waits() && !p.cantStart() && p.refused < w.now && p.info.RequestError == "":
			waits = append(waits, p)
		}
	}
	if bound >= i.need {
		i.ran, i.evicted, i.entered, i.waited, i.halved = true, false, 0, 0, 0
		return
	}
	missing := i.need - bound
	if len(waits) < missing || i.pods[0].job.isBroken() {
		i.entered, i.waited, i.halved = 0, 0, 0
		return
	}
	if bound == 0 && i.ran { // No member is left of its run. It starts again as a new one, which comes after what waits already.
		i.ran, i.entered = false, 0
	}
	if i.entered == 0 {
		i.entered, i.waited, i.paused, i.before, i.fitted = w.now, 0, 0, l.waiting(i), 0
		l.passed(i)
	}
	if !usable {
		return
	}
	if bound > 0 && (!i.ran || i.evicted) {
		if i.halved += livenessInterval; i.halved > l.bound(i) {
			w.violate(inPart, i, "%s has %d of %d members bound for %v", i.name, bound, i.need, i.halved)
		}
		return
	}
	if l.entitled(i, waits[:missing]) && !l.mistaken(i) && !l.sharesPause(i) {
		if i.waited += livenessInterval; i.waited > l.bound(i) {
			w.violate(starved, i, "%s waits for %v, was entitled to run for %v of it, and %d items come before it", i.name, w.now-i.entered, i.waited, i.before)
		}
	}
}

// isBroken reports whether the owner knows that the job can't run.
func (j *job) isBroken() bool {
	if j == nil {
		return false
	}
	_, broken := j.broken()
	return broken
}

// waiting counts the items that wait already. An item that replaces members of a run goes before all but other replacements.
func (l *liveness) waiting(i *item) (n int) {
	for _, o := range l.order {
		if o != i && o.seen == l.w.now && o.entered > 0 && (!i.ran || o.ran) {
			n++
		}
	}
	return n
}

// passed records that the item, which begins to wait, comes before others: by its priority, or by its tenant's turn.
func (l *liveness) passed(i *item) {
	within := l.w.fair.on() && l.withinShare(i, i.pods)
	for _, o := range l.order {
		if o == i || o.entered == 0 || o.seen != l.w.now {
			continue
		}
		higher := i.pods[0].priority > o.pods[0].priority
		if higher || i.ran && !o.ran || within && o.tenant != i.tenant {
			o.before++
		}
	}
}

// bound returns the longest time for which the item may be entitled to run without being bound.
func (l *liveness) bound(i *item) time.Duration {
	w := l.w
	c := w.maxBackoff + w.hold + w.patience + 30*time.Second
	lasts := l.longest + time.Minute // Pods take some time to start and to end.
	if w.fair.reclaimAfter > 0 {
		lasts += w.fair.reclaimAfter + w.fair.minRuntime + time.Minute
	}
	return time.Duration(i.before+1) * (4*(lasts+w.boot) + 2*c)
}

// entitled reports whether the item must run soon if nothing else comes before it.
func (l *liveness) entitled(i *item, pods []*apiPod) bool {
	if l.takesCPU && slices.ContainsFunc(pods, func(p *apiPod) bool { return p.cpu > 0 }) {
		return false // Pods that never reach the extender may take each CPU that becomes free.
	}
	if l.w.now-i.fitted >= 2*time.Minute || i.fitted == 0 {
		i.fitted = l.w.now
		i.fits = (!l.w.fair.on() || l.withinShare(i, pods)) && l.fitsBesideLasting(i, pods)
	}
	return i.fits
}

// staysAfter is how long after its bind a pod that runs for ever can be expected to end: until it is as old as reservations allow, and the
// latest choice of cards before that is over.
func (w *world) staysAfter() time.Duration { return 2*w.maxAge + time.Minute }

// created returns when the item entered the queue: with its oldest pod.
func (i *item) created() time.Duration {
	return slices.MinFunc(i.pods, func(a, b *apiPod) int { return int(a.created - b.created) }).created
}

// mistaken reports whether a pod that stays, and was bound while the item waited, may be expected to end for it, or for an item that comes before it.
func (l *liveness) mistaken(i *item) bool {
	before := func(o *item) bool {
		return o.entered > 0 && o.seen == l.w.now && (o.created() <= i.created() || o.pods[0].priority > i.pods[0].priority || o.tenant != i.tenant)
	}
	return slices.ContainsFunc(l.w.api.order, func(p *apiPod) bool {
		return p.live() && p.lasts == 0 && p.memory > 0 && l.w.now < p.boundAt+l.w.staysAfter() &&
			slices.ContainsFunc(l.order, func(o *item) bool { return before(o) && o.created() < p.boundAt })
	})
}

// sharesPause reports whether the item, a single pod, may share the pause of one of its namespace that asks for the same and can't start. A shape that has
// failed waits for twice queue.LongestPause at most: then it is the turn of the item, which the other one can't keep from it again.
func (l *liveness) sharesPause(i *item) bool {
	own := i.pods[0]
	shares := i.job == nil && i.paused < 2*queue.LongestPause && slices.ContainsFunc(l.w.api.order, func(p *apiPod) bool {
		return p.exists && p.tenant == own.tenant && p.cantStart() && p.asksLike(own)
	})
	if shares {
		i.paused += livenessInterval
	}
	return shares
}

// asksLike reports whether the pods ask for the same, as far as the extender sees it.
func (p *apiPod) asksLike(o *apiPod) bool {
	return p.memory == o.memory && p.twoCards == o.twoCards && p.extras == o.extras && p.cpu == o.cpu && p.ram == o.ram && p.priority == o.priority && p.zone == o.zone
}

// withinShare reports whether the tenant has no more than it gets in any case once the pods are bound.
func (l *liveness) withinShare(i *item, pods []*apiPod) bool {
	allocated := l.allocated()[i.tenant]
	for _, p := range pods {
		allocated += p.memory
	}
	return allocated <= l.leastShare(i.tenant)
}

// excess returns what tenants have above their shares.
func (l *liveness) excess() map[string]int64 {
	allocated, demand := l.allocated(), map[string]gpu.Memory{}
	for _, p := range l.w.api.order {
		if p.exists && !p.info.Ended {
			demand[p.tenant] += gpu.Memory(p.memory)
		}
	}
	var claims []fairshare.Tenant
	for _, t := range l.w.fair.tenants {
		claims = append(claims, fairshare.Tenant{Terms: fairshare.Terms{Weight: int64(t.weight[0] - '0')}, Name: t.name, Demand: demand[t.name]})
	}
	out := map[string]int64{}
	for n, share := range fairshare.Shares(gpu.Memory(l.memory()), claims) {
		out[claims[n].Name] = allocated[claims[n].Name] - int64(share)
	}
	return out
}

// memory returns the memory of all cards that can be used.
func (l *liveness) memory() (total int64) {
	for _, n := range l.w.api.nodes {
		for i, memory := range n.cards {
			if (n.exists && !n.closed || n.pooled) && !n.sick[i] {
				total += memory
			}
		}
	}
	return total
}

// leastShare returns what a tenant gets if all others want as much as they can get.
func (l *liveness) leastShare(tenant string) int64 {
	own, all := int64(0), int64(0)
	for _, t := range l.w.fair.tenants {
		weight := int64(t.weight[0] - '0')
		if all += weight; t.name == tenant {
			own = weight
		}
	}
	if all == 0 {
		return 0
	}
	return l.memory() * own / all
}

// allocated returns what the tenants have.
func (l *liveness) allocated() map[string]int64 {
	out := map[string]int64{}
	for _, p := range l.w.api.order {
		if p.live() {
			out[p.tenant] += p.memory
		}
	}
	return out
}

// fitsBesideLasting reports whether the pods fit beside the pods that stay: those that run for ever, and those without GPU memory. With
// reclaim, pods don't stay whose tenants keep their share without them.
func (l *liveness) fitsBesideLasting(i *item, pods []*apiPod) bool {
	w := l.w
	spare := map[string]int64{}
	if w.fair.reclaimAfter > 0 {
		spare = l.excess()
		delete(spare, i.tenant)
	}
	removed := map[*job]bool{}
	stays := func(p *apiPod) bool {
		return p.memory == 0 || p.lasts == 0 && !removed[p.job]
	}
	b := &beside{stays, true}
	if w.fitBeside(b, pods...) {
		return true
	}
	for _, j := range w.jobs { // A job is evicted whole.
		tenant, size := "", int64(0)
		for _, p := range j.pods {
			if p.live() && p.lasts == 0 {
				tenant, size = p.tenant, size+p.memory
			}
		}
		if size == 0 || size > spare[tenant] {
			continue
		}
		spare[tenant] -= size
		if removed[j] = true; w.fitBeside(b, pods...) {
			return true
		}
	}
	return false
}

// evictedFor records that a victim was evicted for the pod.
func (l *liveness) evictedFor(victim, pod gpu.PodUID) {
	if l == nil {
		return
	}
	v, p := l.w.byUID(victim), l.w.byUID(pod)
	if v == nil || p == nil {
		return
	}
	if i := l.items[firstKey(v)]; i != nil {
		i.evicted = true
	}
	key, _ := keyOf(p)
	l.counts["evicted"]++
	l.evictions = append(l.evictions, &evictionFor{victim: v.name(), victimPod: v, item: key, name: p.name(), at: l.w.now, pod: p})
}

func firstKey(p *apiPod) itemKey {
	key, _ := keyOf(p)
	return key
}

// checkEvictions checks that items run for which pods were evicted.
func (l *liveness) checkEvictions(usable bool) {
	w := l.w
	l.evictions = slices.DeleteFunc(l.evictions, func(e *evictionFor) bool {
		if e.gone == 0 && !e.victimPod.live() {
			e.gone = w.now
		}
		i := l.items[e.item]
		switch {
		case l.quiet > e.at-recovery: // Disturbed.
			l.counts["disturbed"]++
			return true
		case i != nil && i.ran && i.entered == 0, l.otherRan(e):
			l.counts["ran"]++
			return true
		case i == nil, i.seen < w.now && (i.job == nil || !i.job.isBroken()): // Its owner has deleted it.
			l.counts["withdrawn"]++
			return true
		case e.gone == 0 || w.now < e.gone+runsWithin || !usable:
			return false
		case slices.ContainsFunc(i.pods, (*apiPod).cantStart) && (l.unseen == 0 || e.at < l.unseen || e.at >= l.unseen+queue.LongestPause-livenessInterval):
			// It is of the same round, or the pause was over.
			l.counts["can't start"]++
			l.unseen = max(l.unseen, e.gone)
			return true
		}
		l.counts["for nothing"]++
		w.violate(wasted, i, "%s was evicted at %v for %s, which doesn't run", e.victim, e.at, e.name)
		return true
	})
}

// cantStart reports whether something keeps the pod from running that the extender sees only in what becomes of it. That no scheduler asks for a pod
// shows only once its gate is open.
func (p *apiPod) cantStart() bool { return p.hidden() || p.scheduler == absentScheduler }

// otherRan reports whether another run of the group for which the eviction was made has been bound whole since. Two jobs can have the same group:
// then the evictions are for the run that is complete, and an earlier one can become complete meanwhile.
func (l *liveness) otherRan(e *evictionFor) bool {
	since := func(p *apiPod) bool { return p.group == e.pod.group && p.tenant == e.pod.tenant && p.boundAt > e.at }
	return e.pod.group != "" && slices.ContainsFunc(l.order, func(i *item) bool { return i.ran && i.entered == 0 && slices.ContainsFunc(i.pods, since) })
}

// byUID returns the pod with the UID; nil if there is none any more.
func (w *world) byUID(uid gpu.PodUID) *apiPod {
	for _, p := range w.api.order {
		if p.uid() == uid {
			return p
		}
	}
	return nil
}

// recorder receives the Events of an extender. It learns from them for which pods others are evicted.
type recorder struct{ r *replica }

func (recorder) Event(runtime.Object, string, string, string) {}

func (e recorder) Eventf(object runtime.Object, _, reason, _ string, args ...any) {
	ref, ok := object.(*corev1.ObjectReference)
	switch {
	case !ok:
	case reason == eviction.EventReclaimed, reason == eviction.EventEvicted:
		e.r.w.liveness.evictedFor(gpu.PodUID(ref.UID), args[1].(gpu.Pod).UID)
	}
}

func (e recorder) AnnotatedEventf(object runtime.Object, _ map[string]string, kind, reason, format string, args ...any) {
	e.Eventf(object, kind, reason, format, args...)
}

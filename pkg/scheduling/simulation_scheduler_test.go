package scheduling

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
)

// kubeScheduler is a model of kube-scheduler: its queue, its cache with assumed pods, one scheduling cycle at a time, concurrent
// bind calls, and preemption.
type kubeScheduler struct {
	w     *world
	watch *watcher
	nodes []*schedNode
	pods  map[gpu.PodUID]*schedPod
	// order has the pods in the order in which they were first seen.
	order []*schedPod
	// active are the pods that wait for a cycle.
	active []*schedPod
	// parked counts the pods in the unschedulable state.
	parked int
	// cycling is true while a cycle runs or is scheduled.
	cycling bool
	// stopped is until when no cycle begins.
	stopped time.Duration
	cursor  int
	// offered is when a filter call was last made for a member.
	offered map[offer]time.Duration
}

type offer struct{ group, template string }

type schedNode struct {
	name       string
	size, used amounts
	zone       string
	closed     bool
	pods       []*schedPod
}

// schedState is where a pending pod is.
type schedState uint8

const (
	schedNone   schedState = iota // Gated, bound, or of another scheduler.
	schedActive                   // In activeQ.
	schedBackoff
	schedParked // Unschedulable.
	schedBinding
)

type schedPod struct {
	*apiPod
	info   *clustercache.PodInfo
	object *corev1.Pod
	gone   bool
	state  schedState
	// node is where the pod is bound or assumed.
	node      *schedNode
	nominated string
	// preempting is where pods were evicted for it last.
	preempting preempting
	attempts   int
	// queued is when the pod was queued, which orders pods of equal priority. failed is when its last attempt failed.
	queued, failed time.Duration
	// byExtender is true if the extender rejected the pod: then any event lets it be retried.
	byExtender bool
	// failing is true if the last attempt ended in an error: such a pod waits for all of its back-off.
	failing bool
	token   int
	// offered is kubeScheduler.offered of its template when memory was reserved for it last; unasked is for how long it was since then.
	offered, unasked time.Duration
}

// preempting is a preemption for a pod.
type preempting struct {
	node    *schedNode
	victims []*schedPod
	at      time.Duration
}

// goesOn reports whether the pod still waits for the victims, or for the node after their end.
func (p preempting) goesOn(k *kubeScheduler) bool {
	return k.w.now < p.at+time.Second || slices.ContainsFunc(p.victims, func(v *schedPod) bool { return v.exists && v.info.Leaving })
}

func newKubeScheduler(w *world) *kubeScheduler {
	k := &kubeScheduler{w: w, pods: map[gpu.PodUID]*schedPod{}, offered: map[offer]time.Duration{}}
	k.watch = w.api.watch(nil, 5*time.Millisecond, k.observe)
	w.after(30*time.Second, k.flush)
	return k
}

// The names of schedulers: two profiles of kube-scheduler, and one that doesn't exist.
const (
	schedulerName   = "default-scheduler"
	otherProfile    = "other-profile"
	absentScheduler = "absent"
)

// observe applies a change that the watch delivers.
func (k *kubeScheduler) observe(c change) {
	switch {
	case c.budget != nil: // Its preemption respects no budget.
		return
	case c.node != nil:
		k.observeNode(c)
		return
	}
	p := k.pods[c.info.UID]
	if p == nil {
		if c.gone {
			return
		}
		p = &schedPod{apiPod: c.pod}
		k.pods[c.info.UID] = p
		k.order = append(k.order, p)
	}
	before := p.info
	p.info, p.object = c.info, c.object
	switch {
	case c.gone:
		k.forgetPod(p)
	case p.info.Node != "" && p.info.Ended:
		if before != nil && before.Node != "" && !before.Ended || p.node != nil {
			k.place(p, nil)
			k.moveAll(true)
		}
	case p.info.Node != "":
		k.dequeue(p)
		p.state = schedNone
		k.place(p, k.node(p.info.Node))
		p.nominated = ""
	case p.info.Ended, p.scheduler != schedulerName && p.scheduler != otherProfile, len(p.object.Spec.SchedulingGates) > 0:
	case before == nil || before.Node == "" && p.state == schedNone && p.node == nil:
		k.enqueue(p)
	}
	if k.w.sample > 0 && before != nil && before.NominatedNode != p.info.NominatedNode && p.info.Node == "" && !c.gone {
		p.nominated = p.info.NominatedNode
	}
}

func (k *kubeScheduler) observeNode(c change) {
	n := k.node(c.node.name)
	if c.spec == nil {
		k.nodes = slices.DeleteFunc(k.nodes, func(o *schedNode) bool { return o == n })
		return
	}
	grown := false
	if n == nil {
		n = &schedNode{name: c.node.name}
		for _, p := range k.order { // Pods of a node that was deleted and created again.
			if p.info.Node == n.name && !p.info.Ended && !p.gone {
				p.node = nil
				k.place(p, n)
			}
		}
		k.nodes = append(k.nodes, n)
		grown = true
	}
	size := allocatable(c.spec)
	grown = grown || size.exceeds(n.size) || n.closed && !c.spec.Spec.Unschedulable
	n.size, n.zone, n.closed = size, c.spec.Labels["zone"], c.spec.Spec.Unschedulable
	k.moveAll(grown)
}

func (k *kubeScheduler) node(name string) *schedNode {
	for _, n := range k.nodes {
		if n.name == name {
			return n
		}
	}
	return nil
}

// place counts the pod on the node, and nowhere else.
func (k *kubeScheduler) place(p *schedPod, n *schedNode) {
	if p.node == n {
		return
	}
	if old := p.node; old != nil {
		old.used = old.used.minus(p.amounts())
		old.pods = slices.DeleteFunc(old.pods, func(o *schedPod) bool { return o == p })
	}
	p.node = n
	if n != nil {
		n.used = n.used.plus(p.amounts())
		n.pods = append(n.pods, p)
	}
}

// forgetPod removes a deleted pod.
func (k *kubeScheduler) forgetPod(p *schedPod) {
	k.dequeue(p)
	p.gone, p.nominated = true, ""
	delete(k.pods, p.info.UID)
	if n := len(k.order); n > 64 && n > 2*len(k.pods) {
		k.order = slices.DeleteFunc(k.order, func(p *schedPod) bool { return p.gone })
	}
	if p.state == schedBinding && p.info.Node == "" {
		return // The bind cycle ends first.
	}
	p.state = schedNone
	if p.node != nil {
		k.place(p, nil)
		k.moveAll(true)
	}
}

// enqueue adds the pod to activeQ.
func (k *kubeScheduler) enqueue(p *schedPod) {
	k.dequeue(p)
	p.state, p.queued = schedActive, k.w.now
	k.active = append(k.active, p)
	k.kick()
}

func (k *kubeScheduler) dequeue(p *schedPod) {
	p.token++
	switch p.state {
	case schedActive:
		k.active = slices.DeleteFunc(k.active, func(o *schedPod) bool { return o == p })
	case schedParked:
		k.parked--
	}
	if p.state != schedBinding {
		p.state = schedNone
	}
}

// backoff is how long the pod must wait after its last attempt.
func (k *kubeScheduler) backoff(p *schedPod) time.Duration {
	return min(time.Second<<min(max(p.attempts-1, 0), 10), k.w.maxBackoff)
}

// retry moves the pod to activeQ once its back-off is over. kube-scheduler looks for such pods once a second (backoff_queue.go,
// backoffQOrderingWindowDuration), so many come at the same time.
func (k *kubeScheduler) retry(p *schedPod) {
	left := p.failed + k.backoff(p) - k.w.now
	if left <= 0 {
		k.enqueue(p)
		return
	}
	left += time.Second - (k.w.now+left)%time.Second
	k.dequeue(p)
	p.state = schedBackoff
	token := p.token
	k.w.after(left, func() {
		if p.token == token && p.state == schedBackoff {
			k.enqueue(p)
		}
	})
	k.kick()
}

// moveAll retries the unschedulable pods after an event: those that the extender rejected, and all if resources were freed. Nothing that
// happens here creates a claim that is missing.
func (k *kubeScheduler) moveAll(freed bool) {
	if k.parked == 0 {
		return
	}
	for _, p := range k.order {
		if p.state == schedParked && (freed || p.byExtender) && p.volume == "" {
			k.retry(p)
		}
	}
}

// flush retries the pods that have been unschedulable for five minutes.
func (k *kubeScheduler) flush() {
	for _, p := range k.order {
		if p.state == schedParked && k.w.now-p.failed > 5*time.Minute {
			k.retry(p)
		}
	}
	k.w.after(30*time.Second, k.flush)
}

// kick lets a cycle run if there is work.
func (k *kubeScheduler) kick() {
	if !k.cycling && (len(k.active) > 0 || k.w.popFromBackoff) {
		k.cycling = true
		duration := k.w.between(500*time.Microsecond, 3*time.Millisecond)
		duration *= time.Duration(max(1, k.w.slow))
		k.w.after(duration, k.cycle)
	}
}

// pop removes the first pod of activeQ.
func (k *kubeScheduler) pop() *schedPod {
	var first *schedPod
	for _, p := range k.active {
		if first == nil || p.info.Priority > first.info.Priority || p.info.Priority == first.info.Priority && p.queued < first.queued {
			first = p
		}
	}
	if first == nil && k.w.popFromBackoff {
		for _, p := range k.order {
			if p.state == schedBackoff && !p.failing && (first == nil || p.failed+k.backoff(p) < first.failed+k.backoff(first)) {
				first = p
			}
		}
	}
	if first != nil {
		k.dequeue(first)
	}
	return first
}

// cycle is one scheduling cycle.
func (k *kubeScheduler) cycle() {
	if k.stopped > k.w.now {
		k.w.after(k.stopped-k.w.now, k.cycle)
		return
	}
	k.cycling = false
	p := k.pop()
	if p == nil {
		return
	}
	p.attempts++
	p.failing = false
	p.state = schedBinding // It is in no queue.
	if p.volume != "" {    // Rejected before any node is filtered, and preemption doesn't help.
		p.state, p.failed, p.byExtender = schedParked, k.w.now, false
		k.parked++
		message := fmt.Sprintf("0/%d nodes are available: persistentvolumeclaim %q not found.", len(k.nodes), p.volume)
		k.w.after(3*time.Millisecond, func() { k.w.api.setRejected(p.apiPod, message, "") })
		k.kick()
		return
	}
	nodes, short := k.fitting(p)
	if len(nodes) == 0 {
		p.byExtender = false
		k.reject(p, k.message(len(k.nodes), short, ""), nil)
		k.kick()
		return
	}
	names := nodes
	var result FilterResult
	if p.memory > 0 {
		r := k.w.answering()
		switch {
		case r == nil:
			k.again(p)
			k.kick()
			return
		case r.frozenUntil > k.w.now: // The call hangs, and so does the scheduler.
			k.cycling = true
			k.w.after(min(httpTimeout, r.frozenUntil-k.w.now), func() {
				k.cycling = false
				k.again(p)
				k.kick()
			})
			return
		}
		var err error
		if p.group != "" {
			k.offered[offer{p.group, p.info.Member.Template}] = k.w.now
		}
		if k.takesNomination(r, p, nodes) {
			return
		}
		if n := k.w.sample; n > 0 && len(nodes) > n {
			k.cursor += n - 1 // The next sample begins where this one ends.
			nodes = nodes[:n]
		}
		if result, err = r.scheduler.Filter(p.object, nodes); err != nil {
			k.again(p)
			k.kick()
			return
		}
		names = result.Names()
	}
	if len(names) == 0 {
		p.byExtender = true
		k.reject(p, k.message(len(k.nodes), short, extenderMessage(result)), &result)
		k.kick()
		return
	}
	k.bind(p, names[k.w.random.IntN(len(names))])
	k.kick()
}

// takesNomination tries the node that the pod is nominated to before all nodes, and reports whether it passes.
func (k *kubeScheduler) takesNomination(r *replica, p *schedPod, nodes []string) bool {
	node := p.object.Status.NominatedNodeName
	if k.w.sample == 0 || !slices.Contains(nodes, node) {
		return false
	}
	result, err := r.scheduler.Filter(p.object, []string{node})
	if err != nil || len(result.Passed) == 0 {
		return false
	}
	k.w.stats.taken++
	k.bind(p, node)
	k.kick()
	return true
}

// extenderMessage is the part of kube-scheduler's message that comes from the extender.
func extenderMessage(result FilterResult) string {
	if result.Message != "" {
		return "1 " + result.Message
	}
	counts := map[string]int{}
	var order []string
	for _, reason := range result.Reasons {
		if counts[reason.Text()]++; counts[reason.Text()] == 1 {
			order = append(order, reason.Text())
		}
	}
	slices.Sort(order)
	var text []string
	for _, reason := range order {
		text = append(text, fmt.Sprint(counts[reason], " ", reason))
	}
	return strings.Join(text, ", ")
}

func (k *kubeScheduler) message(nodes int, short shortage, extender string) string {
	if nodes == 0 {
		return "no nodes available to schedule pods"
	}
	text := fmt.Sprintf("0/%d nodes are available: %s", nodes, extender)
	for reason, n := range short {
		if n > 0 {
			text += fmt.Sprintf(" %d %s", n, nodeReasonText[reason])
		}
	}
	return text
}

// fitting returns the nodes that kube-scheduler's own filters pass.
func (k *kubeScheduler) fitting(p *schedPod) (names []string, short shortage) {
	for i := range k.nodes {
		n := k.nodes[(i+k.cursor)%len(k.nodes)]
		free := n.size.minus(n.used)
		if k.parked > 0 || k.w.sample > 0 {
			for _, o := range k.order {
				if o.nominated == n.name && o != p && o.node == nil && o.info.Priority >= p.info.Priority {
					free = free.minus(o.amounts())
				}
			}
		}
		reason := n.admits(p)
		if reason == nodeFits {
			reason = p.amounts().lacks(free)
		}
		if reason == nodeFits {
			names = append(names, n.name)
		} else {
			short[reason]++
		}
	}
	k.cursor++
	return names, short
}

// again retries a pod after an error.
func (k *kubeScheduler) again(p *schedPod) {
	p.state, p.failed, p.byExtender, p.failing = schedNone, k.w.now, true, true
	if !p.gone && p.info.Node == "" && !p.info.Ended { // A late Binding can have taken effect while the call was hanging.
		k.retry(p)
	}
}

// reject handles a pod that fits no node. result is the extender's answer, nil if it wasn't asked.
func (k *kubeScheduler) reject(p *schedPod, message string, result *FilterResult) {
	p.state, p.failed = schedParked, k.w.now
	k.parked++
	if p.nominated == "" || !k.awaitsVictims(p) {
		p.nominated = ""
		k.preempt(p, result)
	}
	object, nominated := p.apiPod, p.nominated
	k.w.after(3*time.Millisecond, func() { k.w.api.setRejected(object, message, nominated) })
}

// awaitsVictims reports whether a victim of the pod still terminates on its nominated node.
func (k *kubeScheduler) awaitsVictims(p *schedPod) bool {
	n := k.node(p.nominated)
	return n != nil && slices.ContainsFunc(n.pods, func(o *schedPod) bool { return o.info.Leaving && o.info.Priority < p.info.Priority })
}

// preempt chooses victims for the pod, and deletes them.
func (k *kubeScheduler) preempt(p *schedPod, result *FilterResult) {
	proposed := map[string]preemption.Victims{}
	for _, n := range k.nodes {
		if result != nil { // Only nodes that the extender rejects for a reason that preemption can help with.
			if i := slices.Index(result.Nodes, n.name); i >= 0 && (i >= len(result.Reasons) || !result.Reasons[i].Resolvable()) {
				continue
			}
		}
		if victims := k.victims(p, n); len(victims) > 0 {
			proposed[n.name] = preemption.Victims{Pods: victims}
		}
	}
	if len(proposed) == 0 {
		return
	}
	if p.memory > 0 {
		r := k.w.answering()
		if r == nil || r.frozenUntil > k.w.now {
			return
		}
		var err error
		if proposed, err = r.scheduler.Preempt(r.w.context(), p.object, proposed); err != nil {
			return
		}
		if len(proposed) > 0 && p.group != "" && !k.w.api.joinsAlone(p.apiPod) {
			k.w.fail("%s proposes victims for %s, of whose group no run is whole", r.name, p.name())
		}
		k.w.checkVictims(r, p, proposed)
	}
	if n := k.leastVictims(proposed); n != nil {
		k.evictFor(p, n, proposed[n.name].Pods)
	}
}

// leastVictims returns the node whose victims are the fewest, with the fewest violations of budgets; nil if there is none.
func (k *kubeScheduler) leastVictims(proposed map[string]preemption.Victims) (least *schedNode) {
	for _, n := range k.nodes {
		v := proposed[n.name]
		if len(v.Pods) == 0 {
			continue
		}
		if least == nil || cmp.Or(cmp.Compare(v.Violations, proposed[least.name].Violations), cmp.Compare(len(v.Pods), len(proposed[least.name].Pods))) < 0 {
			least = n
		}
	}
	return least
}

// evictFor deletes the victims, and nominates the pod to the node. Pods of lower priority lose their nominations to it.
func (k *kubeScheduler) evictFor(p *schedPod, n *schedNode, victims []gpu.PodUID) {
	if p.preempting.node != nil && p.preempting.node != n && p.preempting.goesOn(k) {
		k.w.stats.twice++
		k.w.trace("scheduler: %s preempts on %s and on %s", p.name(), p.preempting.node.name, n.name)
	}
	p.preempting = preempting{node: n, at: k.w.now}
	for _, o := range k.order {
		if o.nominated == n.name && o.node == nil && o.info.Priority < p.info.Priority {
			o.nominated = ""
			k.w.after(2*time.Millisecond, func() { k.w.api.clearNomination(o.apiPod) })
		}
	}
	p.nominated = n.name
	for _, uid := range victims {
		victim := k.pods[uid]
		if victim == nil {
			continue
		}
		p.preempting.victims = append(p.preempting.victims, victim)
		k.w.stats.preempted++
		k.w.liveness.evictedFor(uid, p.info.UID)
		k.w.trace("scheduler: %s preempts %s on %s", p.name(), victim.name(), n.name)
		latency := 2 * time.Millisecond
		if k.w.chance(k.w.faults.slow) {
			latency = k.w.between(100*time.Millisecond, 2*time.Second)
		}
		k.w.after(latency, func() {
			if k.w.chance(k.w.faults.rejected) { // It tries again in the next cycle of the pod.
				k.w.trace("api: the deletion of %s fails", victim.name())
				if p.nominated == n.name {
					p.nominated = ""
				}
				return
			}
			k.w.api.delete(victim.apiPod)
		})
	}
}

// victims returns the pods of lower priority to delete so that the pod fits the node, as far as kube-scheduler counts.
func (k *kubeScheduler) victims(p *schedPod, n *schedNode) (victims []gpu.PodUID) {
	if n.admits(p) != nodeFits {
		return nil
	}
	free, need := n.size.minus(n.used), p.amounts()
	var lower []*schedPod
	for _, o := range n.pods {
		if o.info.Priority < p.info.Priority {
			lower = append(lower, o)
			free = free.plus(o.amounts())
		}
	}
	if need.exceeds(free) {
		return nil
	}
	slices.SortStableFunc(lower, func(a, b *schedPod) int { return int(b.info.Priority) - int(a.info.Priority) })
	for _, o := range lower { // Spare as many as possible.
		if left := free.minus(o.amounts()); !need.exceeds(left) {
			free = left
		} else {
			victims = append(victims, o.info.UID)
		}
	}
	return victims
}

// bind assumes the pod on the node and begins the bind cycle.
func (k *kubeScheduler) bind(p *schedPod, name string) {
	p.nominated = ""
	k.place(p, k.node(name))
	if p.memory == 0 { // kube-scheduler binds it itself.
		k.w.after(3*time.Millisecond, func() {
			b := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: p.name(), UID: p.object.UID}, Target: corev1.ObjectReference{Name: name}}
			k.bindDone(p, k.w.api.bind(b, "kube-scheduler"))
		})
		return
	}
	call := &bindCall{request: request(p.object, name)}
	call.done = func(err error) {
		if !call.over {
			call.over = true
			k.bindDone(p, err)
		}
	}
	k.w.after(time.Millisecond, func() {
		r := k.w.answering()
		if r == nil {
			call.done(errStandby)
			return
		}
		k.w.after(httpTimeout, func() {
			if !call.over {
				call.done(errLost)
				r.cancel(call)
			}
		})
		r.bind(call)
	})
}

// bindDone ends the bind cycle.
func (k *kubeScheduler) bindDone(p *schedPod, err error) {
	switch {
	case p.gone:
		if p.node != nil {
			k.place(p, nil)
			k.moveAll(true)
		}
	case p.info.Node != "":
		p.state = schedNone
	case err != nil:
		k.w.trace("scheduler: bind of %s failed: %v", p.name(), err)
		k.place(p, nil)
		k.moveAll(true)
		k.again(p)
	default: // The pod stays assumed until the watch reports it.
		p.state = schedNone
	}
}

package scheduling

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// reservation is the memory that a member keeps without being bound, as a leader's ledger shows it.
type reservation struct {
	since, seen time.Duration
}

const (
	// keptUnasked is the longest time for which a member keeps memory after the latest filter call for its template, all times together: the
	// patience, and some more.
	keptUnasked = time.Minute
	// reservedFor is the longest time for which a member may keep memory without being bound.
	reservedFor = 10 * time.Minute
)

// reservedTime are the sums over time of the memory reserved for groups that can't run, of the part that awaits more, and of all memory.
type reservedTime struct{ impossible, awaits, all float64 }

// checkLedger checks the reservations of the leader.
func (w *world) checkLedger(r *replica) {
	if !r.leads || r.dead {
		return
	}
	all := 0.0
	for _, n := range w.api.nodes {
		for _, memory := range n.cards {
			all += float64(memory)
		}
	}
	w.reserved.all += all
	for id, idle := range r.scheduler.ledger.AwaitedIdle() {
		if i := slices.IndexFunc(w.jobs, func(j *job) bool { return strings.Contains(id+"/", "/"+j.name+"/") }); i >= 0 && w.jobs[i].impossible {
			w.reserved.impossible, w.reserved.awaits = w.reserved.impossible+idle*all, w.reserved.awaits+idle*all
		}
	}
	for _, node := range r.scheduler.ledger.Nodes() {
		for _, a := range node.Allocations {
			if a.State != ledger.Assumed {
				continue
			}
			w.checkReservation(r, a)
		}
	}
	w.checkCharges(r)
	for uid, old := range r.reserved {
		if old.seen != w.now {
			delete(r.reserved, uid)
		}
	}
}

func (w *world) checkReservation(r *replica, a ledger.Allocation) {
	known := r.reserved[a.UID]
	if known == nil {
		known = &reservation{since: w.now}
		r.reserved[a.UID] = known
	}
	known.seen = w.now
	if age := w.now - known.since; age > reservedFor && r.apart < w.now-reservedFor {
		w.fail("%s keeps memory for %s since %v", r.name, a.Name, age)
	}
	p := w.scheduler.pods[a.UID]
	if p == nil || p.group == "" {
		return
	}
	if p.job != nil && p.job.impossible {
		w.reserved.impossible += float64(a.Request)
	}
	if p.info.Node != "" || p.run != nil || p.late || w.api.joinsAlone(p.apiPod) || w.fair.on() {
		return // A bind can be unconfirmed. With fair sharing a member has a place before its gate is opened.
	}
	if at := w.scheduler.offered[offer{p.group, p.info.Member.Template}]; p.offered != at {
		p.offered, p.unasked = at, 0
	}
	if p.unasked += time.Second; p.unasked > keptUnasked {
		w.fail("%s keeps memory for %s for %v, which was offered no nodes since %v", r.name, a.Name, p.unasked, w.now-p.offered)
	}
}

// checkFailures checks that groups that can't run kept little memory reserved. A new leader doesn't know what has failed before, which counts much
// in the short time of a world. Before each failure a group can wait for other pods to end: what is free of its cards meanwhile counts by itself.
// The scenes check the share over an hour.
func (w *world) checkFailures() {
	if r := w.reserved; r.impossible-r.awaits > 0.1*r.all || r.awaits > 0.15*r.all {
		w.fail("groups that can't run kept %.0f%% of the memory reserved, %.0f%% while they waited for more", 100*r.impossible/r.all, 100*r.awaits/r.all)
	}
}

// checkPromise checks the cards of a pod whose bind is about to begin.
func (w *world) checkPromise(r *replica, request BindRequest) {
	name, a, ok := r.scheduler.ledger.Lookup(gpu.PodUID(request.UID))
	if !ok {
		return
	}
	node, _ := r.scheduler.ledger.Node(name)
	for i, card := range node.Cards {
		if slices.Contains(a.Placement.Cards(), card.Index) && a.RDMA == gpu.RDMARequired && card.RDMAPorts == "" {
			w.fail("%s promises card %d of %s, which isn't near an adapter, to %s", r.name, card.Index, name, request.Name)
		}
		if slices.Contains(a.Placement.Cards(), card.Index) && node.Used[i] > card.Memory {
			w.fail("%s promises %d of %d on card %d of %s: the last is %s", r.name, node.Used[i], card.Memory, card.Index, name, request.Name)
		}
		if slices.Contains(a.Placement.Cards(), card.Index) && (a.Cores > 0 && node.UsedCores[i] > gpu.CardCores || card.MaxContainers > 0 && int(node.Containers[i]) > card.MaxContainers) {
			w.fail("%s promises %d%% and %d containers on card %d of %s: the last is %s", r.name, node.UsedCores[i], node.Containers[i], card.Index, name, request.Name)
		}
	}
}

// simResources counts what nodes have free beside the bound pods, as kube-scheduler does.
type simResources struct {
	free map[string]amounts
	pods map[gpu.PodUID]*apiPod
}

func (r simResources) fits(q ledger.ResourceQuery) bool {
	var sum amounts
	for _, uid := range slices.Concat(q.Pods, q.Ahead) {
		sum = sum.plus(r.pods[uid].amounts())
	}
	return !sum.exceeds(r.free[q.Node])
}

// beside is what pods are to fit beside: the bound pods that stay. With pool, the nodes count that an autoscaler can add.
type beside struct {
	stays func(*apiPod) bool
	pool  bool
}

// has reports whether the node can take pods.
func (b *beside) has(n *apiNode) bool { return n.exists && !n.closed || b.pool && n.pooled }

// truth returns a ledger of the cluster as it would be then.
func (w *world) truth(b *beside) *ledger.Ledger {
	r := simResources{map[string]amounts{}, map[gpu.PodUID]*apiPod{}}
	l := ledger.NewWithResources(fake.Resources(r.fits), nil)
	for _, n := range w.api.nodes {
		if !b.has(n) {
			continue
		}
		spec := ledger.NodeSpec{Unit: gpu.MiB}
		for i, memory := range n.cards {
			card := gpu.Card{Index: i, Memory: gpu.Memory(memory)}
			if n.sick[i] {
				card.Unhealthy = "sick"
			}
			spec.Cards = append(spec.Cards, card)
		}
		if w.mixed {
			spec, _ = eligibility.Spec(n.object, protocol.ParseNode(n.object))
		}
		l.SetNode(n.name, spec)
		r.free[n.name] = newBin(n).size
	}
	for _, p := range w.api.order {
		r.pods[p.uid()] = p
		if p.live() && b.stays(p) {
			r.free[p.info.Node] = r.free[p.info.Node].minus(p.amounts())
			if p.memory > 0 {
				l.SetBound(p.info.Node, p.info.Pod, p.info.Placement, time.Time{})
			}
		}
	}
	return l
}

// eligible returns the nodes that the pod may use.
func (w *world) eligible(b *beside, p *apiPod) (names []string) {
	if p.scheduler == absentScheduler {
		return nil
	}
	for _, n := range w.api.nodes {
		if b.has(n) && (p.zone == "" || p.zone == n.zone) {
			names = append(names, n.name)
		}
	}
	return names
}

func (p *apiPod) waits() bool {
	return p.exists && p.info.Node == "" && !p.info.Ended && !p.info.Leaving && !p.gated
}

// fits reports whether the pods fit at the same time, by the ledger's rules, and whatever the order of the nodes and of the pods
// is: the ledger places one after the other, and doesn't find each way in which they fit.
func (w *world) fits(pods ...*apiPod) bool {
	return w.fitBeside(&beside{stays: func(*apiPod) bool { return true }}, pods...)
}

// fitBeside is fits beside what stays.
func (w *world) fitBeside(b *beside, pods ...*apiPod) bool {
	byCPU := slices.SortedStableFunc(slices.Values(pods), func(a, b *apiPod) int { return int(b.cpu - a.cpu) })
	reversed := slices.Clone(byCPU)
	slices.Reverse(reversed)
	for turn := range w.api.nodes {
		if !w.fitsInOrder(b, pods, turn) || !w.fitsInOrder(b, byCPU, turn) || !w.fitsInOrder(b, reversed, turn) {
			return false
		}
	}
	return true
}

func (w *world) fitsInOrder(b *beside, pods []*apiPod, turn int) bool {
	l := w.truth(b)
	requests := make([]ledger.Request, len(pods))
	for i, p := range pods {
		nodes := w.eligible(b, p)
		if len(nodes) == 0 {
			return false
		}
		turn := turn % len(nodes)
		requests[i] = ledger.Request{Pod: p.info.Pod, Nodes: slices.Concat(nodes[turn:], nodes[:turn])}
	}
	places, _ := l.ReserveAll(requests, nil, ledger.View{Card: placement.Binpack, Node: placement.Binpack}, begin)
	return places != nil
}

// fitsAndWaits returns what waits although it fits; empty if nothing does.
func (w *world) fitsAndWaits() string {
	groups := map[string][]*apiPod{}
	var names []string
	for _, p := range w.api.order {
		switch {
		case !p.waits(), p.memory == 0, p.hidden(), p.info.RequestError != "":
		case p.group == "":
			if w.fits(p) {
				return fmt.Sprintf("single pod %s", p.name())
			}
		default:
			if groups[p.group] == nil {
				names = append(names, p.group)
			}
			groups[p.group] = append(groups[p.group], p)
		}
	}
	for _, name := range names {
		pods := groups[name]
		if w.bound(name) > 0 || slices.ContainsFunc(w.api.order, func(p *apiPod) bool { return p.exists && p.group == name && p.size != pods[0].size }) {
			continue // Replacements and surplus members; members that disagree.
		}
		// The oldest members are planned, whether or not others would fit: see "Surplus members" in docs/gangs.md.
		if size := pods[0].size; len(pods) >= size && w.fits(pods[:size]...) && !w.otherIsOldest(pods, size) {
			return fmt.Sprintf("group %s of %d", name, size)
		}
	}
	return ""
}

// otherIsOldest reports whether the group's last member, by age, can be another one, with which the group doesn't fit: creation times are in
// seconds.
func (w *world) otherIsOldest(pods []*apiPod, size int) bool {
	last := pods[size-1].created.Truncate(time.Second)
	return slices.ContainsFunc(pods[size:], func(p *apiPod) bool {
		return p.created.Truncate(time.Second) == last && !w.fits(append(slices.Clone(pods[:size-1]), p)...)
	})
}

// bound counts the bound pods of a group that have not ended.
func (w *world) bound(group string) (n int) {
	for _, p := range w.api.order {
		if p.live() && p.group == group && p.memory > 0 {
			n++
		}
	}
	return n
}

// checkRest checks that each run is bound whole or not at all. The binds of a group can be in flight for a moment.
func (w *world) checkRest() {
	if !w.runUntilEvery(time.Minute, time.Second, func() bool { return w.partlyBound() == "" }) {
		w.fail("%s", w.partlyBound())
	}
}

// partlyBound returns a run that isn't bound whole or not at all, as each is at rest; empty if there is none. A later leader can't distinguish a run that
// lost members before it was whole from one that was whole: see "Limits" in docs/gangs.md.
func (w *world) partlyBound() string {
	for _, p := range w.api.order {
		if !p.live() || p.run == nil || p.run.whole {
			continue
		}
		shrank := p.run.resized && p.run.running()+p.run.succeeded >= p.size // It needs no further member.
		mistakable := p.run.ambiguous && p.run.term != w.terms
		if !shrank && !mistakable && !p.run.misled {
			return fmt.Sprintf("%v is bound in part: %d of %d", p.run.key, p.run.running(), p.run.size)
		}
	}
	return ""
}

// calmDown ends the disturbances and checks what must hold at rest.
func (w *world) calmDown() {
	w.checkFailures()
	if w.faults != (faults{}) && w.chance(0.5) { // Then the last leader finds out alone which groups are bound in part.
		w.changeLeader()
	}
	w.calm, w.faults, w.api.mute, w.api.away = true, faults{}, 0, 0
	for _, n := range w.api.nodes {
		if n.pooled && !n.exists {
			continue
		}
		n.closed = false
		for i := range n.sick {
			n.sick[i] = false
		}
		w.api.setNode(n)
	}
	w.endBudgets()
	w.trace("calm")
	w.runFor(3 * time.Minute)
	waits := ""
	for w.violation == "" {
		if w.runUntilEvery(40*time.Minute, 5*time.Second, func() bool { waits = w.fitsAndWaits(); return waits == "" }) {
			break
		}
		if w.now > w.latestBind+w.staysAfter() {
			w.fail("%s waits although it fits", waits)
		}
	}
	w.checkRest()
	if w.violation != "" {
		return
	}
	for len(w.jobs) > 0 {
		w.jobs[0].stop()
	}
	w.runFor(3 * time.Minute)
	for _, r := range w.replicas {
		w.checkEmpty(r)
	}
}

// runUntilEvery is runUntil with a condition that is expensive.
func (w *world) runUntilEvery(d, interval time.Duration, done func() bool) bool {
	for end := w.now + d; w.now < end && w.violation == ""; w.runFor(interval) {
		if done() {
			return true
		}
	}
	return done()
}

// checkEmpty checks that nothing is left of deleted pods.
func (w *world) checkEmpty(r *replica) {
	for _, node := range r.scheduler.ledger.Nodes() {
		for _, a := range node.Allocations {
			w.fail("%s still has %s on %s: %v", r.name, a.Name, node.Name, a.State)
		}
	}
	for phase, n := range r.scheduler.groups.manager.Phases() {
		if n > 0 {
			w.fail("%s still has %d runs that are %s", r.name, n, phase)
		}
	}
	if n := len(r.held); n > 0 {
		w.fail("%s still holds %d binds", r.name, n)
	}
	for _, p := range w.api.order {
		if p.exists {
			w.fail("the simulation left %s", p.name())
		}
	}
}

// groupState describes a group, for the report of a failure.
func (w *world) groupState(r *replica, uid gpu.PodUID) string {
	status, waits := r.scheduler.groups.manager.Status(uid)
	if !waits {
		return "doesn't wait"
	}
	return status.Reason.Text()
}

// report describes what waits.
func (w *world) report() string {
	var text strings.Builder
	r := w.answering()
	for _, p := range w.api.order {
		if p.exists && p.info.Node == "" && r != nil {
			s := w.scheduler.pods[p.uid()]
			state := schedNone
			if s != nil {
				state = s.state
			}
			fmt.Fprintf(&text, "%s memory %d cpu %d priority %d zone %q: %s; queue %d, %v\n", p.name(), p.memory, p.cpu, p.priority, p.zone, w.groupState(r, p.uid()), state, p.object.Status.Conditions)
		}
	}
	for _, n := range w.api.nodes {
		fmt.Fprintf(&text, "node %s zone %s cpu %d cards %v used %v\n", n.name, n.zone, n.cpu, n.cards, n.used)
	}
	if r != nil {
		for _, node := range r.scheduler.ledger.Nodes() {
			fmt.Fprintf(&text, "%s: node %s used %v:", r.name, node.Name, node.Used)
			for _, a := range node.Allocations {
				fmt.Fprintf(&text, " %s %s %v %d;", a.Name, a.State, a.Placement, a.Request)
			}
			fmt.Fprintln(&text)
		}
	}
	return text.String()
}

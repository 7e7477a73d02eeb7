package scheduling

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/fake"
)

// apiServer holds the true state of the cluster, and a log of changes that watchers read.
type apiServer struct {
	w    *world
	pods map[string]*apiPod
	// order has the pods in the order of their creation.
	order   []*apiPod
	nodes   []*apiNode
	log     []change
	base    int // The number of changes that were dropped from log.
	version int
	serial  int
	watches []*watcher
	runs    map[runKey]*run
	// configMap is the record of evictions.
	configMap corev1.ConfigMap
	// mute is until when no Binding is answered. Some take effect.
	mute time.Duration
	// away is until when Bindings don't arrive.
	away    time.Duration
	budgets []*budget
}

// apiPod is a pod. Its object is never changed in place.
type apiPod struct {
	podSpec
	object *corev1.Pod
	info   *clustercache.PodInfo
	exists bool
	// job is the pod's job; nil for a single pod.
	job *job
	// member is the pod's index in the job.
	member, generation int
	// revision is that of the template from which a StatefulSet created it.
	revision int
	// counts are the numbers of cards that the pod's label has asked for, nil if it has never changed. relabelled is when a label changed
	// last.
	counts     map[int]bool
	relabelled time.Duration
	// late is true if the answer to a Binding of the pod was lost.
	late bool
	// rejections are the versions of the pod with the messages that it had since its last other change.
	rejections map[rejection]rejected
	// created and boundAt are when it was created, and bound.
	created, boundAt time.Duration
	// run is the run in which the pod was bound; nil if it isn't bound, or names no group.
	run *run
}

func (p *apiPod) name() string    { return p.object.Name }
func (p *apiPod) uid() gpu.PodUID { return p.info.UID }
func (p *apiPod) bound() bool     { return p.exists && p.info.Node != "" }

// live reports whether the pod is bound and has not ended. It uses its card until its containers end.
func (p *apiPod) live() bool { return p.bound() && !p.info.Ended }

// changed lets the pod's controller know that it has started, has ended, terminates, or is gone.
func (p *apiPod) changed() {
	if p.job != nil {
		p.job.podChanged(p)
	}
}

// podSpec is what doesn't change of a pod.
type podSpec struct {
	memory   int64
	twoCards bool
	extras
	constraints
	// cpu and ram are the requested CPUs and GiB of memory.
	cpu, ram  int64
	priority  int32
	group     string
	size      int
	scheduler string
	gated     bool
	// tenant is the pod's namespace, if the world has tenants. fairGate is true if the pod was created with the gate of fair sharing.
	tenant   string
	fairGate bool
	// refused is until when the API server refuses to bind the pod.
	refused time.Duration
	// lasts is how long the pod runs; 0 for ever. It then succeeds, or fails. grace is how long it takes to end after its deletion.
	lasts, grace time.Duration
	fails        bool
	// budgets are the labels of the disruption budgets that cover it. unhealthy is true if it never becomes ready.
	budgets   []string
	unhealthy bool
}

type apiNode struct {
	name  string
	cards []int64
	sick  []bool
	// cpu, ram and pods are the CPUs, the GiB of memory and the number of pods of the node.
	cpu, ram, pods int64
	zone           string
	closed         bool
	exists         bool
	object         *corev1.Node
	// pooled is true if an autoscaler adds and removes the node.
	pooled bool
	// largest is the size that each card has, or had before changes that a watch hasn't reported: an extender learns late that a card
	// shrank. The node then rejects the pod.
	largest []int64
	used    []int64
	version int
	nodeMode
}

// change is a change of a pod or a node.
type change struct {
	pod    *apiPod
	info   *clustercache.PodInfo
	object *corev1.Pod
	node   *apiNode
	spec   *corev1.Node // nil if the node was deleted.
	gone   bool
	// budget is a disruption budget; disruptions is nil if it was deleted.
	budget      *budget
	disruptions *policyv1.PodDisruptionBudget
	// touched is true if only an annotation changed that the extender doesn't read.
	touched bool
}

// watcher delivers the log to a client, late.
type watcher struct {
	w       *world
	owner   *replica
	next    int
	deliver func(change)
	// lag is the longest normal delay.
	lag time.Duration
	// stalled is until when nothing is delivered.
	stalled   time.Duration
	scheduled bool
	closed    bool
}

func newAPIServer(w *world) *apiServer {
	return &apiServer{
		w: w, pods: map[string]*apiPod{}, runs: map[runKey]*run{},
		configMap: corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "0"}, Data: map[string]string{}},
	}
}

// watch returns a watcher of the changes from now on.
func (a *apiServer) watch(owner *replica, lag time.Duration, deliver func(change)) *watcher {
	w := &watcher{w: a.w, owner: owner, next: a.base + len(a.log), deliver: deliver, lag: lag}
	a.watches = append(a.watches, w)
	return w
}

func (a *apiServer) publish(c change) {
	a.log = append(a.log, c)
	for _, watch := range a.watches {
		watch.schedule()
	}
}

// schedule lets the next change be delivered.
func (t *watcher) schedule() {
	if t.scheduled || t.closed || t.next >= t.w.api.base+len(t.w.api.log) {
		return
	}
	t.scheduled = true
	at := max(t.w.now+t.w.between(0, t.lag), t.stalled)
	if t.owner != nil {
		at = max(at, t.owner.frozenUntil, t.owner.apart)
	}
	t.w.after(at-t.w.now, t.run)
}

// run delivers the changes that have come so far.
func (t *watcher) run() {
	t.scheduled = false
	if t.closed {
		return
	}
	if t.stalled > t.w.now || t.owner != nil && max(t.owner.frozenUntil, t.owner.apart) > t.w.now {
		t.schedule()
		return
	}
	a := t.w.api
	for end := a.base + len(a.log); t.next < end && t.w.violation == ""; {
		c := a.log[t.next-a.base]
		t.next++
		t.w.steps++ // Each delivered change is a step.
		t.deliver(c)
	}
	if len(a.log) > 4096 {
		a.trim()
	}
}

// trim drops the changes that every watcher has.
func (a *apiServer) trim() {
	a.watches = slices.DeleteFunc(a.watches, func(t *watcher) bool { return t.closed })
	least := a.base + len(a.log)
	for _, t := range a.watches {
		least = min(least, t.next)
	}
	a.log = slices.Clone(a.log[least-a.base:])
	a.base = least
}

func notFound(pod string) error { return apierrors.NewNotFound(fake.PodResource, pod) }

func conflict(pod, why string) error {
	return apierrors.NewConflict(fake.PodResource, pod, errors.New(why))
}

func quantity(n int64) resource.Quantity { return *resource.NewQuantity(n, resource.DecimalSI) }

// create creates a pod.
func (a *apiServer) create(name string, spec podSpec, by owner, j *job, member int) *apiPod {
	a.serial++
	object := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: cmp.Or(spec.tenant, "default"), Name: name, UID: types.UID(fmt.Sprintf("u%06d", a.serial)), Annotations: map[string]string{},
			CreationTimestamp: metav1.NewTime(virtualClock{a.w}.Now().Truncate(time.Second)),
		},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: new(int64(math.Ceil(spec.grace.Seconds()))),
			SchedulerName:                 spec.scheduler, Priority: &spec.priority,
			Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{}}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	limits := object.Spec.Containers[0].Resources.Limits
	if spec.memory > 0 {
		limits[protocol.ResourceMemory] = quantity(spec.memory)
	}
	if spec.twoCards {
		metav1.SetMetaDataLabel(&object.ObjectMeta, protocol.LabelCount, "2")
	}
	if spec.rdma != "" {
		metav1.SetMetaDataLabel(&object.ObjectMeta, protocol.LabelRDMA, spec.rdma)
	}
	spec.extras.apply(&object.Spec)
	spec.constraints.apply(object)
	for _, label := range spec.budgets {
		if object.Labels == nil {
			object.Labels = map[string]string{}
		}
		object.Labels[label] = "yes"
	}
	requests := corev1.ResourceList{}
	if spec.cpu > 0 {
		requests[corev1.ResourceCPU] = quantity(spec.cpu)
	}
	if spec.ram > 0 {
		requests[corev1.ResourceMemory] = quantity(spec.ram << 30)
	}
	object.Spec.Containers[0].Resources.Requests = requests
	if spec.group != "" {
		object.Annotations[protocol.AnnotationGroupName] = spec.group
		object.Annotations[protocol.AnnotationGroupSize] = strconv.Itoa(spec.size)
	}
	if by.replica != "" {
		metav1.SetMetaDataLabel(&object.ObjectMeta, "leaderworkerset.sigs.k8s.io/group-key", by.replica)
		object.Annotations["leaderworkerset.sigs.k8s.io/size"] = strconv.Itoa(by.replicaSize)
	}
	if by.name != "" {
		yes := true
		object.OwnerReferences = []metav1.OwnerReference{{Kind: by.kind, Name: by.name, UID: types.UID(cmp.Or(by.uid, by.name)), Controller: &yes}}
	}
	if by.kind == "ReplicaSet" {
		metav1.SetMetaDataLabel(&object.ObjectMeta, appsv1.DefaultDeploymentUniqueLabelKey, by.name[strings.LastIndexByte(by.name, '-')+1:])
	}
	if spec.gated {
		object.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: testGate}}
	}
	if spec.fairGate {
		object.Spec.SchedulingGates = append(object.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: protocol.GateFairShare})
	}
	p := &apiPod{podSpec: spec, object: object, exists: true, job: j, member: member, generation: by.generation, created: a.w.now}
	if a.pods[name] != nil {
		panic("two pods have the name " + name)
	}
	a.pods[name] = p
	a.order = append(a.order, p)
	a.set(p)
	if spec.group != "" {
		p.group = p.info.Member.Gang.Name // A label completes it.
	}
	a.w.trace("api: created %s %s (memory %d, cpu %d, priority %d, group %s/%d)", name, p.uid(), spec.memory, spec.cpu, spec.priority, spec.group, spec.size)
	return p
}

// edit changes a pod.
func (a *apiServer) edit(p *apiPod, how func(*corev1.Pod)) {
	object := *p.object
	object.Annotations = maps.Clone(object.Annotations)
	object.Status.Conditions = slices.Clone(object.Status.Conditions)
	how(&object)
	p.object = &object
	a.set(p)
}

func (a *apiServer) set(p *apiPod) {
	a.version++
	p.rejections = nil
	p.object.ResourceVersion = strconv.Itoa(a.version)
	p.info = clustercache.NewPodInfo(p.object)
	a.publish(change{pod: p, info: p.info, object: p.object})
	a.budgetsChanged(p)
}

// remove removes the pod's object.
func (a *apiServer) remove(p *apiPod) {
	if !p.exists {
		return
	}
	if p.live() {
		a.release(p)
	}
	p.exists = false
	delete(a.pods, p.name())
	a.w.trace("api: %s %s is gone", p.name(), p.uid())
	a.version++
	a.publish(change{pod: p, info: p.info, object: p.object, gone: true})
	a.budgetsChanged(p)
	a.left(p)
	if n := len(a.order); n > 64 && n > 2*len(a.pods) {
		a.order = slices.DeleteFunc(a.order, func(p *apiPod) bool { return !p.exists })
	}
	p.changed()
}

// delete deletes a pod: at once if it isn't bound, after its grace period otherwise.
func (a *apiServer) delete(p *apiPod) {
	switch {
	case !p.exists || p.info.Leaving:
	case !p.live():
		a.remove(p)
	default:
		a.edit(p, func(object *corev1.Pod) {
			at := metav1.NewTime(virtualClock{a.w}.Now().Add(p.grace))
			object.DeletionTimestamp = &at
		})
		a.w.trace("api: %s is terminating", p.name())
		ends := a.w.between(0, p.grace)
		if !a.w.calm && a.w.chance(a.w.faults.stuck) { // The kubelet is away, or the containers can't be killed.
			ends = p.grace + a.w.between(0, 2*time.Minute)
		}
		a.w.after(ends, func() { a.remove(p) })
		p.changed()
	}
}

// end lets a pod succeed or fail.
func (a *apiServer) end(p *apiPod, phase corev1.PodPhase) {
	if !p.live() {
		return
	}
	a.release(p)
	a.edit(p, func(object *corev1.Pod) { object.Status.Phase = phase })
	a.w.trace("api: %s has ended: %s", p.name(), phase)
	if p.run != nil {
		p.run.ended(p, phase == corev1.PodSucceeded)
	}
	p.changed()
	a.w.after(a.w.between(time.Second, time.Minute), func() { a.remove(p) })
}

// deletePodsOn deletes the pods of a node that is gone, as the pod garbage collector does.
func (a *apiServer) deletePodsOn(node string) {
	for _, p := range slices.Clone(a.order) {
		if p.live() && p.info.Node == node {
			a.remove(p)
		}
	}
}

// release returns the memory that the pod used.
func (a *apiServer) release(p *apiPod) {
	if node := a.node(p.info.Node); node != nil {
		for _, share := range p.info.Placement {
			node.used[share.Card] -= int64(share.Memory)
			node.count(share, -1)
		}
	}
}

func (a *apiServer) node(name string) *apiNode {
	for _, node := range a.nodes {
		if node.name == name {
			return node
		}
	}
	return nil
}

// setNode publishes a node after a change of its fields.
func (a *apiServer) setNode(n *apiNode) {
	inventory, sum, healthy := protocol.Inventory{Unit: gpu.MiB, Features: []string{protocol.FeatureCards}}, int64(0), int64(0)
	for i, memory := range n.cards {
		card := gpu.Card{Index: i, Memory: gpu.Memory(memory), NUMANode: gpu.NoNUMANode}
		if n.sick[i] {
			card.Unhealthy = "Xid 79"
		} else {
			healthy += memory
		}
		inventory.Cards = append(inventory.Cards, card)
		sum += memory
		n.largest[i] = max(n.largest[i], memory)
	}
	n.apply(&inventory)
	annotation, err := inventory.Annotation()
	if err != nil {
		panic(err)
	}
	n.version++
	n.object = &corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: n.name, Labels: map[string]string{"zone": n.zone, corev1.LabelHostname: n.name}, Annotations: map[string]string{protocol.AnnotationInventory: annotation},
	}}
	n.object.Spec.Unschedulable = n.closed
	n.object.Status.Capacity = corev1.ResourceList{
		protocol.ResourceMemory: quantity(sum), protocol.ResourceCount: quantity(int64(len(n.cards))),
		corev1.ResourceCPU: quantity(n.cpu), corev1.ResourceMemory: quantity(n.ram << 30), corev1.ResourcePods: quantity(n.pods),
	}
	if slices.Contains(inventory.Features, protocol.FeatureCores) {
		n.object.Status.Capacity[protocol.ResourceCores] = quantity(100 * int64(len(n.cards)))
	}
	n.object.Status.Allocatable = maps.Clone(n.object.Status.Capacity)
	n.object.Status.Allocatable[protocol.ResourceMemory] = quantity(healthy)
	n.exists = true
	a.w.trace("api: node %s has cards %v sick %v, cpu %d, closed %v", n.name, n.cards, n.sick, n.cpu, n.closed)
	a.publish(change{node: n, spec: n.object})
	a.learned(n, n.version, a.base+len(a.log))
}

// learned ends the memory of larger cards once each watch has reported the first changes of the log, which end with this version of
// the node: a new leader's watch can be behind for minutes.
func (a *apiServer) learned(n *apiNode, version int, changes int) {
	a.w.after(5*time.Minute, func() {
		behind := func(t *watcher) bool { return !t.closed && t.next < changes }
		switch {
		case n.version != version:
		case slices.ContainsFunc(a.watches, behind):
			a.learned(n, version, changes)
		default:
			copy(n.largest, n.cards)
		}
	})
}

// addNode adds a node.
func (a *apiServer) addNode(name, zone string, cpu int64, cards ...int64) *apiNode {
	n := newNode(name, zone, cpu, cards...)
	a.nodes = append(a.nodes, n)
	a.setNode(n)
	return n
}

// newNode returns a node that isn't there yet, with 4 GiB for each CPU.
func newNode(name, zone string, cpu int64, cards ...int64) *apiNode {
	return &apiNode{
		name: name, zone: zone, cpu: cpu, ram: 4 * cpu, pods: 110, cards: cards, sick: make([]bool, len(cards)), largest: make([]int64, len(cards)), used: make([]int64, len(cards)),
	}
}

// removeNode deletes the Node object. Its pods stay until they are deleted.
func (a *apiServer) removeNode(n *apiNode) {
	if n.exists {
		n.exists = false
		a.w.trace("api: node %s is gone", n.name)
		a.publish(change{node: n})
	}
}

// touchNode sets an annotation of a node, which requeues pods.
func (a *apiServer) touchNode(name, key, value string) error {
	n := a.node(name)
	if n == nil || !n.exists {
		return apierrors.NewNotFound(corev1.Resource("nodes"), name)
	}
	object := *n.object
	object.Annotations = maps.Clone(object.Annotations)
	object.Annotations[key] = value
	n.object = &object
	a.publish(change{node: n, spec: n.object, touched: true})
	return nil
}

// bind is the API server's part of a Binding.
func (a *apiServer) bind(b *corev1.Binding, by string) error {
	p := a.pods[b.Name]
	switch {
	case p == nil:
		return notFound(b.Name)
	case b.UID != "" && p.object.UID != b.UID:
		return conflict(b.Name, "another UID")
	case p.info.Node != "":
		return conflict(b.Name, "bound to "+p.info.Node)
	case p.info.Leaving:
		return conflict(b.Name, "terminating")
	}
	a.edit(p, func(object *corev1.Pod) {
		object.Spec.NodeName = b.Target.Name
		maps.Copy(object.Annotations, b.Annotations)
		object.Status.Conditions = []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(virtualClock{a.w}.Now().Truncate(time.Second)),
		}}
		object.Status.NominatedNodeName = ""
	})
	a.w.trace("api: %s bound to %s %v run %q whole %q by %s", p.name(), b.Target.Name, p.info.Placement,
		p.object.Annotations[protocol.AnnotationGroupRun], p.object.Annotations[protocol.AnnotationGroupWhole], by)
	if n := a.node(b.Target.Name); n != nil {
		for _, share := range p.info.Placement {
			n.used[share.Card] += int64(share.Memory)
			if size := n.largest[share.Card]; n.used[share.Card] > size {
				a.w.fail("card %d of %s has %d of %d bound: the last is %s", share.Card, n.name, n.used[share.Card], size, p.name())
			}
			n.count(share, 1)
		}
		a.w.checkCards(p, n)
	}
	a.w.stats.binds++
	p.boundAt, a.w.latestBind = a.w.now, a.w.now
	if p.group == "" {
		a.w.stats.singles++
	} else if p.memory > 0 {
		a.joined(p)
		a.w.moment()
	}
	a.w.after(a.w.between(time.Second, 3*time.Second), func() { a.started(p) })
	return nil
}

// started lets a pod run and, after its time, succeed.
func (a *apiServer) started(p *apiPod) {
	if !p.live() || p.info.Leaving {
		return
	}
	a.edit(p, func(object *corev1.Pod) { object.Status.Phase = corev1.PodRunning })
	p.changed()
	a.w.maybeOverruns(p)
	if p.lasts > 0 {
		a.w.after(p.lasts, func() {
			if !a.w.calm { // Later, nothing ends by itself.
				phase := corev1.PodSucceeded
				if p.fails {
					phase = corev1.PodFailed
				}
				a.end(p, phase)
			}
		})
	}
}

// rejection is what kube-scheduler writes to a pod after a failed attempt.
type rejection struct{ message, nominated string }

type rejected struct {
	object *corev1.Pod
	info   *clustercache.PodInfo
}

// setRejected sets the pod's PodScheduled condition, as kube-scheduler does after a failed attempt.
func (a *apiServer) setRejected(p *apiPod, message, nominated string) {
	if !p.exists || p.info.Node != "" {
		return
	}
	if c := p.object.Status.Conditions; len(c) == 1 && c[0].Message == message && p.object.Status.NominatedNodeName == nominated {
		return
	}
	key, known := rejection{message, nominated}, p.rejections
	if again, ok := known[key]; ok { // Most pods have few messages, and it is expensive to parse a pod.
		p.object, p.info = again.object, again.info
		a.publish(change{pod: p, info: p.info, object: p.object})
		return
	}
	a.edit(p, func(object *corev1.Pod) {
		object.Status.Conditions = []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: message,
		}}
		object.Status.NominatedNodeName = nominated
	})
	if known == nil {
		known = map[rejection]rejected{}
	}
	known[key], p.rejections = rejected{p.object, p.info}, known
}

// clearNomination removes the nomination of a pending pod, as kube-scheduler does.
func (a *apiServer) clearNomination(p *apiPod) {
	if p.exists && p.info.Node == "" && p.object.Status.NominatedNodeName != "" {
		a.edit(p, func(object *corev1.Pod) { object.Status.NominatedNodeName = "" })
	}
}

// nominate is the API server's part of a nomination by the extender.
func (a *apiServer) nominate(pod gpu.Pod, version, node, by string) error {
	p := a.pods[pod.Name]
	switch {
	case p == nil:
		return notFound(pod.Name)
	case p.uid() != pod.UID || p.object.ResourceVersion != version:
		return conflict(pod.Name, "another version")
	case node != "" && p.object.Status.NominatedNodeName != "", p.info.Node != "":
		a.w.fail("%s nominates %s, which has node %q and nomination %q", by, p.name(), p.info.Node, p.object.Status.NominatedNodeName)
	}
	a.w.stats.nominated++
	a.w.trace("api: %s nominates %s to %q", by, p.name(), node)
	a.edit(p, func(object *corev1.Pod) { object.Status.NominatedNodeName = node })
	return nil
}

// runKey identifies a run at the API server.
type runKey struct {
	group gang.Key
	run   string
}

// run is the truth about one run of a group.
type run struct {
	key  runKey
	size int
	// members are the pods that were bound in it and still exist; succeeded counts those that have succeeded.
	members   []*apiPod
	succeeded int
	// whole is true once all of its members were bound at the same time.
	whole bool
	// ambiguous is true if it lost a member before it was whole: a new leader can't distinguish it from a run that
	// was whole.
	ambiguous bool
	wholeAt   time.Duration
	// term is the value of world.terms at the first bind, generation that of the pod.
	term, generation int
	// resized is true if the group's number was changed, misled if the extender may not have known that at a bind, or that a member was deleted: a
	// Binding that says that the run is whole can take effect seconds after it was sent.
	resized, misled bool
	// controllers are those of the pods that were bound in it.
	controllers map[string]bool
}

// joinsAlone reports whether a pending member may be placed alone: a run of its group was whole, or members of its controller
// have succeeded. A new leader doesn't know whether the others were bound with those.
func (a *apiServer) joinsAlone(p *apiPod) bool {
	for _, r := range a.runs {
		if r.key.group.Name == p.group && (r.whole || r.ambiguous || r.resized || p.job.resized) {
			return true
		}
	}
	return slices.ContainsFunc(a.order, func(o *apiPod) bool {
		return o.group == p.group && o.object.Status.Phase == corev1.PodSucceeded
	})
}

// proven reports whether a member proves that the run is whole. Without it, a new leader may err.
func (r *run) proven() bool {
	return slices.ContainsFunc(r.members, func(p *apiPod) bool {
		return p.live() && p.info.Member.MarkedWhole
	})
}

func (r *run) running() (n int) {
	for _, p := range r.members {
		if p.live() {
			n++
		}
	}
	return n
}

// joined adds a bound pod to its run.
func (a *apiServer) joined(p *apiPod) {
	key := runKey{p.info.Member.Gang, p.object.Annotations[protocol.AnnotationGroupRun]}
	if key.run == "" && p.info.Member.Controller != "" {
		key.run = fmt.Sprint("generation ", p.generation)
	}
	r := a.runs[key]
	if r == nil {
		r = &run{key: key, controllers: map[string]bool{}, term: a.w.terms, generation: p.generation}
		a.runs[key] = r
	}
	if controller := p.info.Member.Controller; r.whole && p.info.Member.Kind != gang.LeaderWorkerSet && r.proven() && !r.controllers[controller] && !p.late && p.created > max(r.wholeAt, a.w.blind)+time.Second {
		a.w.fail("%s of controller %q joins run %v, which was whole before and has none of its pods", p.name(), controller, key)
	}
	r.controllers[p.info.Member.Controller] = true
	r.resized = r.resized || p.job.resized
	r.misled = r.misled || p.job.resized && a.w.now <= a.w.blind+time.Second || p.late && p.info.Member.MarkedWhole
	r.members, r.size = append(r.members, p), p.size
	p.run = r
	n := 0
	for _, p := range r.members {
		if p.live() && !p.info.Leaving {
			n++
		}
	}
	succeeded := 0 // Members that have succeeded count even if the others are bound in a later round.
	for _, o := range a.order {
		if o.exists && o.group == p.group && o.generation == p.generation && o.object.Status.Phase == corev1.PodSucceeded {
			succeeded++
		}
	}
	ended := 0 // Those that no longer exist count too if they existed when the round began.
	for _, o := range a.runs {
		if o.key.group == r.key.group && o.generation == p.generation {
			ended += o.succeeded
		}
	}
	marked := p.info.Member.MarkedWhole
	if !r.whole && n+max(succeeded, r.succeeded) >= r.size {
		r.whole, r.wholeAt = true, a.w.now
		for _, o := range a.order { // Surplus members stay in the run.
			if o.exists && o.group == p.group {
				r.controllers[o.info.Member.Controller] = true
			}
		}
		a.w.stats.whole++
		a.w.trace("api: run %v is whole", key)
	} else if marked && !r.whole && !r.ambiguous {
		// A member may have been deleted, or have ended, between the write of the others and this one.
		if len(r.members)+ended >= r.size {
			r.whole, r.wholeAt = true, a.w.now
		}
	}
}

func (r *run) ended(p *apiPod, succeeded bool) {
	if succeeded {
		r.succeeded++
	}
	if !r.whole {
		r.ambiguous = true
	}
}

// missing records that a pod is gone or can't be placed. If it was pending, a new leader may count a member of its group as lost.
func (a *apiServer) missing(p *apiPod) {
	if p.group == "" || p.run != nil {
		return
	}
	for _, r := range a.runs {
		if r.key.group.Name == p.group && !r.whole {
			r.ambiguous = true
		}
	}
}

// left removes a pod from its run.
func (a *apiServer) left(p *apiPod) {
	a.missing(p)
	r := p.run
	if r == nil {
		return
	}
	r.members = slices.DeleteFunc(r.members, func(o *apiPod) bool { return o == p })
	if !r.whole {
		r.ambiguous = true
	}
}

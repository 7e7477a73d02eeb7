package scheduling

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"
	"unique"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

const (
	// nominateInterval is the interval between two looks at the queue.
	nominateInterval = 50 * time.Millisecond
	// queueHead is how many pods at the head of the queue are left to kube-scheduler: it tries them before a write would arrive.
	queueHead = 24
	// schedulerActive is how long after its last filter call a scheduler counts as running. Pods of others are not nominated.
	schedulerActive = 30 * time.Second
	// nominationTimeout bounds one write, and nominationUnseen is how long after its begin the watch may take to show it.
	nominationTimeout, nominationUnseen = 5 * time.Second, 10 * time.Second
	// nominationLife is how long a nomination may stay, since memory is kept for the pod meanwhile. kube-scheduler removes it if the pod
	// fits nowhere and may preempt (k8s.io/kubernetes pkg/scheduler/framework/preemption, Preempt), but it may not try the pod for long.
	nominationLife = time.Minute
	// gatedLife is the same for a pod that has its gate still: its place may be granted to others, while kube-scheduler keeps it for
	// this pod (k8s.io/kubernetes pkg/scheduler/backend/queue/nominator.go records gated pods too).
	gatedLife = 10 * time.Second
	// gatedTimeout bounds the write before a gate is opened, which waits for it.
	gatedTimeout = time.Second
	// nominationPause is how long none are made after a write failed.
	nominationPause = 10 * time.Second
	// maxSchedulers limits the schedulers that are remembered, so that requests with invented names cannot exhaust memory.
	maxSchedulers = 100
	// maxNominating is the maximum number of concurrent writes.
	maxNominating = 32
)

// The results of nominations, as labels of metrics. After a conflict the pod has changed, mostly because it was tried meanwhile.
const (
	NominationMade     = "made"
	NominationConflict = "conflict"
	NominationFailed   = "failed"
	NominationRemoved  = "removed"
)

// nominator nominates pods ahead of kube-scheduler: while pods queue, it chooses nodes for the next ones as Filter would, and writes
// them to status.nominatedNodeName. kube-scheduler then evaluates only that node, and the others if that one doesn't pass
// (k8s.io/kubernetes pkg/scheduler/schedule_one.go, findNodesThatFitPod). In a large cluster it spends most of its time on evaluating
// all nodes for each pod and on sending their names, although the extender chooses the node.
//
// The ledger keeps the memory of a nominated pod from pods of equal or lower priority, like that of a preemptor. A pod is
// nominated once before kube-scheduler tries it, or after a sample had no room for it (see sample.go). A nomination which kube-scheduler
// makes for a preemptor stays as it is. mu guards the fields below it. The ledger is not called under it. A nil nominator does nothing.
type nominator struct {
	api      API
	ledger   *ledger.Ledger
	cache    clusterCache
	free     *freeResources
	fair     *fairShare
	observer Observer
	leading  func() error
	clock    clock.WithTicker
	view     ledger.View
	// nodes returns the nodes with their objects.
	nodes func() []diagnosis.Node
	// ahead is the maximum number of nominated pods that kube-scheduler has not tried, head is queueHead, and few the number of
	// eligible nodes up to which a pod is left to kube-scheduler.
	ahead, head, few int
	writes           errgroup.Group
	// start begins a write, which is one of writes outside the simulation.
	start func(write func())
	// samples is true if filter calls can have samples. requeue makes kube-scheduler retry rejected pods by a change of the node, or of
	// any node if it is empty.
	samples bool
	requeue func(node string)

	mu sync.Mutex
	// steerings are the pods to nominate to nodes outside the sample that rejected them, and searched is when they were last looked
	// through. refused is until when such nominations are not expected to help a pod, by refusedKey.
	steerings map[gpu.PodUID]steering
	searched  time.Time
	refused   map[string]time.Time
	// pods are the pending pods that may be nominated or are.
	pods map[gpu.PodUID]*queuedPod
	// arrivals counts the pods that were added.
	arrivals int
	// called is the time of the last filter call of each scheduler.
	called map[string]time.Time
	// paused is the time until which nothing is nominated.
	paused time.Time
}

// queuedPod is a pod of kube-scheduler's queue.
type queuedPod struct {
	*clustercache.PodInfo
	// arrival is the pod's position in the order in which the watch reported the pods. kube-scheduler's queue has the same order
	// within a priority (pkg/scheduler/framework/plugins/queuesort, Less).
	arrival int
	state   queuedState
	// tried is true once filter was called for the pod, steered if it is nominated after that (see sample.go), taken if filter has
	// rejected the node since.
	tried, steered, taken bool
	// node is the nominated node, and at is when the nomination was written or first seen.
	node string
	at   time.Time
}

type queuedState int

const (
	// waiting: the pod may be nominated.
	waiting queuedState = iota
	// writing: the pod is nominated in the ledger. The watch hasn't shown it yet.
	writing
	// nominated: the watch has shown the nomination.
	nominated
	// done: the pod isn't nominated by the extender any more, unless a write that was given up takes effect.
	done
)

func (s *Scheduler) newNominator() *nominator {
	n := &nominator{
		api: s.API, ledger: s.ledger, cache: s.cache, free: s.free, fair: s.fair, observer: s.Observer, leading: s.Leading, clock: s.Clock,
		view: ledger.View{Card: s.CardPolicy, Node: s.NodePolicy}, nodes: s.diagnosisNodes, ahead: s.NominateAhead, head: queueHead, few: max(s.few(), s.NominateAbove),
		samples: s.SampleSize != nil, requeue: s.requeue.All, refused: map[string]time.Time{},
		pods: map[gpu.PodUID]*queuedPod{}, called: map[string]time.Time{}, steerings: map[gpu.PodUID]steering{},
	}
	// Without FilterBest kube-scheduler's scores choose among all nodes that fit. To evaluate a sample costs less than a nomination.
	if s.FilterBest == 0 || n.samples {
		n.ahead = 0
	}
	n.writes.SetLimit(maxNominating)
	n.start = func(write func()) {
		n.writes.Go(func() error {
			write()
			return nil
		})
	}
	return n
}

// updated passes on the state of a pod, as the watch reports it.
func (n *nominator) updated(pod *clustercache.PodInfo) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[pod.UID]
	gated := pod.Gated && pod.NominatedNode == ""
	// A nominated pod can become one that isn't nominated, by its labels. Its nomination still ends after nominationLife.
	if pod.Pending == nil || !pod.Managed || gated || excluded(pod) && (p == nil || p.node == "") {
		delete(n.pods, pod.UID)
		return
	}
	if p == nil {
		n.arrivals++
		p = &queuedPod{arrival: n.arrivals}
		n.pods[pod.UID] = p
	}
	p.PodInfo = pod
	switch {
	case p.state == waiting && pod.NominatedNode != "" && !pod.Pending.Tried: // Before its gate was opened, or by an earlier leader.
		p.state, p.node, p.at = nominated, pod.NominatedNode, n.clock.Now()
	case p.state == waiting && (pod.Pending.Tried || pod.NominatedNode != "" || constrained(pod)):
		p.state = done
	case p.state == writing && pod.NominatedNode != "" && pod.NominatedNode != p.node: // By kube-scheduler: the write meets a conflict.
		p.state = done
	case p.state == writing && pod.NominatedNode != "":
		p.state = nominated
	case p.state == done && (!pod.Pending.Tried || p.steered) && pod.NominatedNode != "" && pod.NominatedNode == p.node: // The write was given up, and took effect. Later kube-scheduler may nominate the pod.
		p.state, p.at = nominated, n.clock.Now()
	case p.state == nominated && pod.NominatedNode != p.node:
		p.state = done
	}
}

// excluded reports whether the pod is none that kube-scheduler schedules by itself, or one whose nomination kube-scheduler wouldn't end.
func excluded(pod *clustercache.PodInfo) bool {
	return pod.Member != nil || pod.GatedOtherwise || pod.RequestError != "" || pod.NeverPreempts
}

// constrained reports whether the pod's node depends on other pods. It is left to kube-scheduler.
func constrained(pod *clustercache.PodInfo) bool {
	c := &pod.Conflicts
	return c.RequiredAntiAffinity || c.RequiredSpread || c.RareVolumes || c.Claims || len(c.HostPorts) > 0
}

// gone removes a pod that is no longer pending.
func (n *nominator) gone(uid gpu.PodUID) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.pods, uid)
	delete(n.steerings, uid)
}

// keeps reports whether the ledger's nomination of the pod stays although the watch shows none: its write is in progress.
func (n *nominator) keeps(pod *clustercache.PodInfo) bool {
	if n == nil || pod.NominatedNode != "" {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[pod.UID]
	return p != nil && p.state == writing
}

// filtering records a filter call. It reports whether the only candidate node is the one to which the pod was nominated here: if the
// pod doesn't fit, kube-scheduler goes on with all nodes.
func (n *nominator) filtering(object *corev1.Pod, nodes []string) (alone bool) {
	if n == nil {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	scheduler := cmp.Or(object.Spec.SchedulerName, corev1.DefaultSchedulerName)
	if _, known := n.called[scheduler]; known || len(n.called) < maxSchedulers {
		n.called[scheduler] = n.clock.Now()
	}
	p := n.pods[gpu.PodUID(object.UID)]
	if p == nil {
		return false
	}
	p.tried = true
	if p.state == waiting {
		p.state = done
	}
	return p.state != done && len(nodes) == 1 && nodes[0] == p.node
}

// run nominates pods until ctx ends.
func (n *nominator) run(ctx context.Context) error {
	ticker := n.clock.NewTicker(nominateInterval)
	defer ticker.Stop()
	defer func() { _ = n.writes.Wait() }() // It returns no error.
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			n.tick(ctx)
		}
	}
}

// tick nominates the next pods if this process is the leader, and removes nominations that lead nowhere.
func (n *nominator) tick(ctx context.Context) {
	n.dropUnseen()
	if n.leading() != nil || n.cache.Ready() != nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		clear(n.steerings) // Another process is called now.
		return
	}
	for _, pod := range n.expired() {
		n.start(func() { n.write(ctx, pod, "") })
	}
	n.steerAll(ctx)
	if pods := n.next(); len(pods) > 0 {
		n.nominate(ctx, pods, n.few)
	}
}

// next returns the pods to nominate, in kube-scheduler's order, and marks them.
func (n *nominator) next() (pods []*clustercache.PodInfo) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ahead == 0 {
		return nil
	}
	now := n.clock.Now()
	var queue []*queuedPod
	ahead := 0
	for _, p := range n.pods {
		switch {
		case p.state == done || p.tried || !n.active(p.PodInfo, now):
			continue
		case p.state != waiting:
			ahead++
		}
		queue = append(queue, p)
	}
	// Many at a time cost less than one by one, see ledger.NominateAll.
	if ahead > n.ahead/2 || len(queue) <= n.head || now.Before(n.paused) {
		return nil
	}
	slices.SortFunc(queue, func(a, b *queuedPod) int {
		return cmp.Or(cmp.Compare(b.Priority, a.Priority), cmp.Compare(a.arrival, b.arrival))
	})
	for _, p := range queue[n.head:] {
		if p.state == waiting && len(pods) < n.ahead-ahead {
			p.state, p.at = writing, now
			pods = append(pods, p.PodInfo)
		}
	}
	return pods
}

// active reports whether the pod's scheduler has called lately. The caller holds the lock.
func (n *nominator) active(pod *clustercache.PodInfo, now time.Time) bool {
	return now.Sub(n.called[pod.Pending.Scheduler]) <= schedulerActive
}

// nominate chooses the nodes of pods that have more than few eligible ones, and begins to write them.
func (n *nominator) nominate(ctx context.Context, pods []*clustercache.PodInfo, few int) {
	view, unseen := n.view, n.unseen()
	view.TentativeAt = n.clock.Now()
	capacity := n.free.capacity(func(node string) []gpu.PodUID { return unseen[node] }, false)
	requests, granted := n.requests(pods, few)
	nodes := n.ledger.NominateAll(requests, view, capacity)
	for i, pod := range pods {
		nodes[i] = cmp.Or(nodes[i], granted[i])
		if nodes[i] != "" && !n.chosen(pod.UID, nodes[i]) {
			if !n.nominatedByOthers(pod.UID) { // It was bound or deleted meanwhile.
				n.ledger.RemoveNomination(pod.UID)
			}
			nodes[i] = ""
		} else if nodes[i] == "" {
			n.chosen(pod.UID, "")
		}
	}
	for i, pod := range pods { // With a slow API server this waits, so every choice is recorded before.
		if node := nodes[i]; node != "" {
			n.start(func() { n.write(ctx, pod, node) })
		}
	}
}

// nominatedByOthers reports whether the watch has shown a nomination of the pod, which then is kube-scheduler's.
func (n *nominator) nominatedByOthers(uid gpu.PodUID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[uid]
	return p != nil && p.NominatedNode != ""
}

// requests returns the pods with their eligible nodes, and the places that fair sharing has granted to some. There are none for a pod
// with few eligible nodes: evaluating these costs kube-scheduler less than a nomination costs the API server, and if filter would name
// every node that fits, kube-scheduler's scores choose among them.
func (n *nominator) requests(pods []*clustercache.PodInfo, few int) (requests []ledger.Request, granted []string) {
	nodes := n.nodes()
	eligible := map[unique.Handle[string]][]string{}
	requests, granted = make([]ledger.Request, len(pods)), make([]string, len(pods))
	for i, pod := range pods {
		names, known := eligible[pod.Constraints]
		if !known {
			names = diagnosis.EligibleNodesFor(nodes, pod.Constraints.Value())
			eligible[pod.Constraints] = names
		}
		if requests[i].Pod = pod.Pod; len(names) <= few {
			continue
		}
		granted[i], _, _ = n.ledger.Lookup(pod.UID)
		if n.fair.evicts(pod.Pod) { // Otherwise fair sharing decides when it may run, and reserves its place.
			requests[i].Nodes = names
		}
	}
	return requests, granted
}

// unseen returns the pods whose nomination the watch hasn't shown, by node.
func (n *nominator) unseen() map[string][]gpu.PodUID {
	n.mu.Lock()
	defer n.mu.Unlock()
	unseen := map[string][]gpu.PodUID{}
	for uid, p := range n.pods {
		if p.state == writing && p.node != "" {
			unseen[p.node] = append(unseen[p.node], uid)
		}
	}
	return unseen
}

// chosen records the node that was chosen for a pod, empty for none. It reports whether it is to be written.
func (n *nominator) chosen(uid gpu.PodUID, node string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[uid]
	if p == nil || p.state != writing {
		return false
	}
	p.node = node
	if node == "" {
		p.state = done
	}
	return node != ""
}

// nominateGated nominates a pod to the place that fair sharing has granted it, before its gate is opened: kube-scheduler tries a pod as
// soon as it has no gate. eligible is the number of its eligible nodes. The watch shows the nomination before the open gate. If the pod
// is nominated to another node already, that nomination is removed.
func (n *nominator) nominateGated(ctx context.Context, pod gpu.Pod, eligible int) {
	if n == nil || eligible <= n.few {
		return
	}
	place, _, granted := n.ledger.Lookup(pod.UID)
	info, known := n.cache.Pod(pod.Namespace, pod.Name)
	if !granted || !known || info.UID != pod.UID || info.Pending == nil || info.NominatedNode == place || excluded(info) || constrained(info) {
		return
	}
	if info.NominatedNode != "" { // By an earlier leader. One write can't move it.
		place = ""
	}
	n.mu.Lock()
	now := n.clock.Now()
	nominates := n.active(info, now) && !now.Before(n.paused)
	n.mu.Unlock()
	if nominates && n.leading() == nil {
		n.send(ctx, info, place, gatedTimeout)
	}
}

// write writes the nomination of the pod, or removes it if node is empty.
func (n *nominator) write(ctx context.Context, pod *clustercache.PodInfo, node string) {
	if n.leading() != nil || ctx.Err() != nil || node != "" && !n.due(pod.UID) {
		n.drop(pod.UID)
		return
	}
	switch done := n.send(ctx, pod, node, nominationTimeout); {
	case node == "":
	case !done:
		n.drop(pod.UID)
	case n.steered(pod.UID):
		n.requeue(node)
	}
}

// send performs one write, and reports whether it succeeded.
func (n *nominator) send(ctx context.Context, pod *clustercache.PodInfo, node string, timeout time.Duration) bool {
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	n.observer.APIWrite("nomination")
	err := n.api.Nominate(limited, pod.Pod, pod.GetObjectMeta().GetResourceVersion(), node)
	result := NominationMade
	switch {
	case err == nil && node == "":
		result = NominationRemoved
	case apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsInvalid(err): // It was tried, bound or deleted meanwhile.
		result = NominationConflict
	case err != nil && ctx.Err() != nil: // This process is stopping.
		result = NominationFailed
	case err != nil:
		result = NominationFailed
		klog.FromContext(ctx).Error(err, "Pod not nominated ahead of kube-scheduler, pausing", "pod", klog.KRef(pod.Namespace, pod.Name), "pause", nominationPause)
		n.pause()
	}
	n.observer.Nominated(result)
	return err == nil
}

// due reports whether the chosen node of a pod is still to be written: kube-scheduler hasn't tried the pod, unless it is nominated after
// that, and no write failed, while this one waited for others.
func (n *nominator) due(uid gpu.PodUID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[uid]
	return p != nil && p.state == writing && (!p.tried || p.steered) && !n.clock.Now().Before(n.paused)
}

func (n *nominator) pause() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.paused = n.clock.Now().Add(nominationPause)
}

// drop removes the ledger's nomination of a pod, unless the watch has shown it. If the write succeeded after all, the watch restores
// it.
func (n *nominator) drop(uid gpu.PodUID) {
	n.mu.Lock()
	p := n.pods[uid]
	dropped := p != nil && p.state == writing
	if dropped {
		p.state = done
	}
	n.mu.Unlock()
	if dropped {
		n.ledger.RemoveNomination(uid)
	}
}

// dropUnseen drops the nominations that the watch should have shown by now.
func (n *nominator) dropUnseen() {
	n.mu.Lock()
	var unseen []gpu.PodUID
	for uid, p := range n.pods {
		if p.state == writing && n.clock.Since(p.at) > nominationUnseen {
			unseen = append(unseen, uid)
		}
	}
	n.mu.Unlock()
	for _, uid := range unseen {
		n.drop(uid)
	}
}

// expired returns the pods whose nomination is to be removed. While pods leave the node, kube-scheduler may have nominated the pod
// there for a preemption. A removal that fails is tried again.
func (n *nominator) expired() (pods []*clustercache.PodInfo) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.clock.Now()
	for _, p := range n.pods {
		life := nominationLife
		if p.Gated {
			life = gatedLife
		}
		leaving := func(pod *clustercache.PodInfo) bool { return pod.Leaving && pod.Priority < p.Priority }
		if p.state == nominated && now.Sub(p.at) > life && !slices.ContainsFunc(n.cache.PodsOn(p.node), leaving) {
			p.at = now
			pods = append(pods, p.PodInfo)
		}
	}
	return pods
}

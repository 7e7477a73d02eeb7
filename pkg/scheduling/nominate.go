package scheduling

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// maxNominating is the maximum number of concurrent writes.
const maxNominating = 32

// nominator nominates pods to nodes outside the sample that rejected them (see sample.go): it writes status.nominatedNodeName. kube-scheduler
// then evaluates this node first, and other nodes only if this one doesn't pass (k8s.io/kubernetes pkg/scheduler/schedule_one.go,
// findNodesThatFitPod).
//
// The ledger reserves memory for a nominated pod, as for a preemptor: pods of equal or lower priority see it as used. A nominator doesn't
// change nominations that kube-scheduler makes for preemptors. mu guards the fields below it. The ledger is not called with mu held. A nil
// nominator does nothing.
type nominator struct {
	api      API
	ledger   *ledger.Ledger
	cache    clusterCache
	nodes    *eligibility.Cluster
	fair     *fairShare
	observer Observer
	leading  func() error
	clock    clock.WithTicker
	view     ledger.View
	writes   eviction.Group
	// answerLost is how long after its begin a write can take effect whose answer was lost.
	answerLost time.Duration
	// requeue makes kube-scheduler retry rejected pods by a change of the node, or of any node if it is empty.
	requeue func(node string)

	mu sync.Mutex
	// steerings are the pods to nominate to nodes outside the sample that rejected them, and searched is when they were last looked
	// through. refused is until when such nominations are not expected to help a pod, by refusedKey.
	steerings map[gpu.PodUID]steering
	searched  time.Time
	refused   map[refusedPods]time.Time
	// pods are the pending pods that are nominated here, or were.
	pods map[gpu.PodUID]*nominatedPod
	// paused is the time until which nothing is nominated.
	paused time.Time
}

// nominatedPod is a pod that is nominated here, or was.
type nominatedPod struct {
	*clustercache.PodInfo
	state nominationState
	// taken is true if filter has rejected the node after the nomination.
	taken bool
	// node is the nominated node, and at is when the nomination was written or first seen.
	node string
	at   time.Time
}

type nominationState int

const (
	// done: the pod isn't nominated here any more, unless a write that was given up takes effect.
	done nominationState = iota
	// writing: the pod is nominated in the ledger. The watch hasn't shown it yet.
	writing
	// nominated: the watch has shown the nomination.
	nominated
)

func (s *Scheduler) newNominator() *nominator {
	n := &nominator{
		api: s.API, ledger: s.ledger, cache: s.cache, nodes: s.nodes, fair: s.fair, observer: s.Observer, leading: s.Leading, clock: s.Clock,
		view: s.view(), requeue: s.requeue.All, writes: s.newGroup(maxNominating), answerLost: s.BindDeadline(),
		refused: map[refusedPods]time.Time{}, pods: map[gpu.PodUID]*nominatedPod{}, steerings: map[gpu.PodUID]steering{},
	}
	return n
}

// start begins a write.
func (n *nominator) start(write func()) {
	n.writes.Go(func() error {
		write()
		return nil
	})
}

// updated passes on the state of a pod, as the watch reports it.
func (n *nominator) updated(pod *clustercache.PodInfo) {
	if n == nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[pod.UID]
	if p == nil {
		return
	}
	if pod.Pending == nil || !pod.Managed {
		delete(n.pods, pod.UID)
		return
	}
	p.PodInfo = pod
	switch {
	case p.state == writing && pod.NominatedNode != "" && pod.NominatedNode != p.node: // By kube-scheduler: the write meets a conflict.
		p.state = done
	case p.state == writing && pod.NominatedNode != "":
		p.state = nominated
	case p.state == done && pod.NominatedNode != "" && pod.NominatedNode == p.node: // The write was given up, and took effect.
		p.state, p.at = nominated, n.clock.Now()
	case p.state == nominated && pod.NominatedNode != p.node:
		p.state = done
	}
}

// constrained reports whether the pod's node depends on other pods. Only kube-scheduler chooses the node of such a pod.
func constrained(pod *clustercache.PodInfo) bool {
	c := &pod.Conflicts
	return pod.TooLarge || c.RequiredAntiAffinity || c.RequiredSpread || c.RareVolumes || c.Claims || c.UsesHostPorts()
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

// alone reports whether the only candidate node of a filter call is the node to which the pod was nominated here. If the pod doesn't fit it,
// kube-scheduler continues with other nodes.
func (n *nominator) alone(uid gpu.PodUID, nodes []string) bool {
	return len(nodes) == 1 && n.nominated(uid, nodes[0])
}

// nominated reports whether the pod was nominated here to the node.
func (n *nominator) nominated(uid gpu.PodUID, node string) bool {
	if n == nil {
		return false
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[uid]
	return p != nil && p.state != done && node == p.node
}

// run nominates pods until ctx ends.
func (n *nominator) run(ctx context.Context) error {
	ticker := n.clock.NewTicker(tickInterval)
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

// tick nominates the pods that are due, and removes expired nominations, if this process is the leader.
func (n *nominator) tick(ctx context.Context) {
	n.dropUnseen()
	if n.leading() != nil || n.cache.Ready() != nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		clear(n.steerings) // kube-scheduler calls another process now.
		return
	}
	for _, pod := range n.expired() {
		n.start(func() { n.write(ctx, pod, "") })
	}
	n.steerAll(ctx)
}

// nominate chooses the nodes of single pods, and begins to write them. It reports whether there is none for some.
func (n *nominator) nominate(ctx context.Context, pods []*clustercache.PodInfo) (refused bool) {
	view, unseen := n.view, n.unseen()
	view.TentativeAt = n.clock.Now()
	capacity := n.nodes.Capacity(func(node string) []gpu.PodUID { return unseen[node] }, false)
	requests, granted := n.requests(pods)
	nodes := n.ledger.NominateAll(requests, view, capacity)
	for i, pod := range pods {
		nodes[i] = cmp.Or(nodes[i], granted[i])
		switch due := n.chosen(pod, nodes[i]); {
		case nodes[i] == "":
			refused = refused || due
		case !due:
			nodes[i] = ""
			if !n.nominatedByOthers(pod.UID) { // It was bound or deleted meanwhile.
				n.ledger.RemoveNomination(pod.UID)
			}
		}
	}
	for i, pod := range pods { // This loop waits if the API server is slow, so every choice is recorded before it.
		if node := nodes[i]; node != "" {
			n.start(func() { n.write(ctx, pod, node) })
		}
	}
	return refused
}

// nominatedByOthers reports whether the watch has shown a nomination of the pod, which then is kube-scheduler's.
func (n *nominator) nominatedByOthers(uid gpu.PodUID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[uid]
	return p != nil && p.NominatedNode != ""
}

// requests returns the pods with their eligible nodes, and the places that fair sharing has granted to some.
func (n *nominator) requests(pods []*clustercache.PodInfo) (requests []ledger.Request, granted []string) {
	requests, granted = make([]ledger.Request, len(pods)), make([]string, len(pods))
	for i, pod := range pods {
		requests[i].Pod = pod.Pod
		granted[i], _, _ = n.ledger.Lookup(pod.UID)
		if n.fair.evicts(pod.Pod) { // Otherwise fair sharing decides when it may run, and reserves its place.
			requests[i].Nodes = n.nodes.Names(pod.Constraints)
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

// chosen records the node that was chosen for a pod. If node is empty, no node has room, and nominations don't help the pod. chosen reports
// whether the pod was still to be nominated.
func (n *nominator) chosen(pod *clustercache.PodInfo, node string) (due bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[pod.UID]
	if p == nil || p.state != writing {
		return false
	}
	p.node = node
	if node == "" {
		p.state = done
		n.refuse(pod)
	}
	return true
}

// write writes the nomination of the pod, or removes it if node is empty.
func (n *nominator) write(ctx context.Context, pod *clustercache.PodInfo, node string) {
	if n.leading() != nil || ctx.Err() != nil || node != "" && !n.due(pod.UID) {
		n.drop(pod.UID)
		return
	}
	switch done := n.send(ctx, pod, node); {
	case node == "":
	case !done:
		n.drop(pod.UID)
	default:
		n.requeue(node)
	}
}

// send performs one write, and reports whether it succeeded.
func (n *nominator) send(ctx context.Context, pod *clustercache.PodInfo, node string) bool {
	n.observer.APIWrite("nomination")
	err := n.api.Nominate(ctx, pod.Pod, pod.GetObjectMeta().GetResourceVersion(), node)
	result := reasons.ResultMade
	switch {
	case err == nil && node == "":
		result = reasons.ResultRemoved
	case apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsInvalid(err): // It was tried, bound or deleted meanwhile.
		result = reasons.ResultConflict
	case err != nil && ctx.Err() != nil: // This process is stopping.
		result = reasons.ResultFailed
	case err != nil:
		result = reasons.ResultFailed
		klog.FromContext(ctx).Error(err, "Pod not nominated to a node outside the sample, pausing", "pod", klog.KRef(pod.Namespace, pod.Name), "pause", queue.Retry)
		n.pause()
	}
	n.observer.Nominated(result)
	return err == nil
}

// due reports whether the chosen node of a pod is still to be written: no write failed while this one waited for others.
func (n *nominator) due(uid gpu.PodUID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[uid]
	return p != nil && p.state == writing && !n.clock.Now().Before(n.paused)
}

func (n *nominator) pause() {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.paused = n.clock.Now().Add(queue.Retry)
}

// drop removes the ledger's nomination of a pod, unless the watch has shown it. If the write takes effect later, the watch restores the
// nomination.
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
		if p.state == writing && n.clock.Since(p.at) > n.answerLost {
			unseen = append(unseen, uid)
		}
	}
	n.mu.Unlock()
	for _, uid := range unseen {
		n.drop(uid)
	}
}

// expired returns the pods whose nomination is to be removed, because memory is reserved for the pod meanwhile: kube-scheduler removes a nomination if
// the pod fits nowhere and may preempt (k8s.io/kubernetes pkg/scheduler/framework/preemption, Preempt), but it may not retry the pod for a long time.
// While pods leave the node, kube-scheduler may have nominated the pod there for a preemption. A removal that fails is tried again.
func (n *nominator) expired() (pods []*clustercache.PodInfo) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.clock.Now()
	for _, p := range n.pods {
		leaving := func(pod *clustercache.PodInfo) bool { return pod.Leaving && pod.Priority < p.Priority }
		if p.state == nominated && now.Sub(p.at) > queue.Arrival && !slices.ContainsFunc(n.cache.PodsOn(p.node), leaving) {
			p.at = now
			pods = append(pods, p.PodInfo)
		}
	}
	return pods
}

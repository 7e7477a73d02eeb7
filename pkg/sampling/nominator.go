// Package sampling nominates pods to nodes outside the sample of nodes that kube-scheduler has offered.
//
// With percentageOfNodesToScore below 100, kube-scheduler stops when it has found enough nodes. A filter call then has only a sample of the
// nodes that kube-scheduler's own filters would pass (k8s.io/kubernetes pkg/scheduler/schedule_one.go, numFeasibleNodesToFind). In a large
// cluster this saves most of its work. Each sample begins where the last one ended, so every node is in a sample sooner or later.
//
// Usually a sample has room. If it has none but another node has, filter rejects the pod, and the pod is nominated to that node and
// requeued: kube-scheduler evaluates a nominated node before all others, and those only if it doesn't pass (findNodesThatFitPod). Until then,
// for at most queue.Retry, no pod is evicted for it. If the nomination isn't made in that time, or kube-scheduler rejects the node,
// nominations don't help: kube-scheduler has a reason that is unknown here. Then, for queue.KubeSchedulerRetries, a sample counts as all nodes
// for this pod, and the pod is requeued as long as any node seems to have room (see requeue.Requeuer.Rejected).
package sampling

import (
	"context"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// TickInterval is the interval between two calls of Tick.
const TickInterval = 100 * time.Millisecond

// maxWrites is the maximum number of concurrent writes.
const maxWrites = 32

// API writes nominations.
type API interface {
	// Nominate sets status.nominatedNodeName of a pod, or removes it if node is empty, if the pod still has the resource version.
	Nominate(ctx context.Context, pod gpu.Pod, resourceVersion, node string) error
}

// Observer receives what metrics count.
type Observer interface {
	// APIWrite counts a write before it begins.
	APIWrite(what string)
	// Nominated counts nominations by result.
	Nominated(result reasons.Result)
}

// Cache is the part of package clustercache that a Nominator uses.
type Cache interface {
	Ready() error
	Nodes() []*corev1.Node
	PodsOn(node string) []*clustercache.PodInfo
	PendingPod(uid gpu.PodUID) (*clustercache.PodInfo, bool)
}

// Options configure a Nominator.
type Options struct {
	API      API
	Ledger   *ledger.Ledger
	Cache    Cache
	Nodes    *eligibility.Cluster
	Observer Observer
	// SampleSize returns the smallest number of candidate nodes that can be a sample, in a cluster of that many nodes. It is nil if
	// kube-scheduler offers no samples.
	SampleSize func(nodes int) int
	// Requeue makes kube-scheduler retry rejected pods by a change of the node, or of any node if it is empty.
	Requeue func(node string)
	// Leading is called right before each write; an error prevents the write.
	Leading func() error
	View    ledger.View
	// AnswerLost is how long after its begin a write can take effect whose answer was lost.
	AnswerLost time.Duration
	Writes     func(limit int) background.Group
	Clock      clock.WithTicker
}

// Nominator nominates pods: it writes status.nominatedNodeName. The ledger reserves memory for a nominated pod, as for a preemptor: pods of
// equal or lower priority see it as used. A Nominator doesn't change nominations that kube-scheduler makes for preemptors.
//
// Its methods are safe for concurrent use.
type Nominator struct {
	Options
	writes background.Group

	// mu guards the fields below it. The ledger is not called with mu held.
	mu sync.Mutex
	// requests are the pods to nominate, and searched is when it was last checked which of them are due. givenUp is until when
	// nominations are not expected to help a pod.
	requests map[gpu.PodUID]request
	searched time.Time
	givenUp  map[givenUpKey]time.Time
	// pods are the pending pods that are nominated here, or were.
	pods map[gpu.PodUID]*nominatedPod
	// paused is the time until which nothing is nominated.
	paused time.Time
}

// nominatedPod is a pod that is nominated here, or was.
type nominatedPod struct {
	state nominationState
	// rejected is true if filter has rejected the node after the nomination.
	rejected bool
	// node is the nominated node, and at is when the nomination was written or first seen.
	node string
	at   time.Time
}

type nominationState int

const (
	// done: the pod isn't nominated here any more, unless a write that was dropped takes effect.
	done nominationState = iota
	// writing: the pod is nominated in the ledger. The watch hasn't shown it yet.
	writing
	// nominated: the watch has shown the nomination.
	nominated
)

// New returns a Nominator. It writes nothing before Run.
func New(o Options) *Nominator {
	return &Nominator{
		Options: o, writes: o.Writes(maxWrites),
		givenUp: map[givenUpKey]time.Time{}, pods: map[gpu.PodUID]*nominatedPod{}, requests: map[gpu.PodUID]request{},
	}
}

// Updated passes on the state of a pod, as the watch reports it.
func (n *Nominator) Updated(pod *clustercache.PodInfo) {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[pod.UID]
	if p == nil {
		return
	}
	switch {
	case pod.Pending == nil, !pod.Managed:
		delete(n.pods, pod.UID)
	case pod.NominatedNode == "" && p.state == writing: // The watch doesn't show the nomination yet.
	case pod.NominatedNode == "", pod.NominatedNode != p.node: // kube-scheduler has changed it. A write that is in progress meets a conflict.
		p.state = done
	case p.state == done: // The write was dropped, and took effect.
		p.state, p.at = nominated, n.Clock.Now()
	default:
		p.state = nominated
	}
}

// Gone removes a pod that is no longer pending.
func (n *Nominator) Gone(uid gpu.PodUID) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.pods, uid)
	delete(n.requests, uid)
}

// Keeps reports whether the ledger's nomination of the pod stays although the watch shows none: its write is in progress.
func (n *Nominator) Keeps(uid gpu.PodUID) bool { return n.pod(uid).state == writing }

// Nominated reports whether the pod was nominated here to the node.
func (n *Nominator) Nominated(uid gpu.PodUID, node string) bool {
	p := n.pod(uid)
	return p.state != done && p.node == node
}

// pod returns what is kept of a pod; the zero value if nothing is.
func (n *Nominator) pod(uid gpu.PodUID) nominatedPod {
	n.mu.Lock()
	defer n.mu.Unlock()
	if p := n.pods[uid]; p != nil {
		return *p
	}
	return nominatedPod{}
}

// Run nominates pods until ctx ends.
func (n *Nominator) Run(ctx context.Context) error {
	defer func() { _ = n.writes.Wait() }() // It returns no error.
	return background.Every(ctx, n.Clock, TickInterval, n.Tick)
}

// Tick nominates the pods that are due, and removes expired nominations, if this process is the leader.
func (n *Nominator) Tick(ctx context.Context) {
	n.dropUnreported()
	if n.Leading() != nil || n.Cache.Ready() != nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		clear(n.requests) // kube-scheduler calls another process now.
		return
	}
	for _, pod := range n.expired() {
		n.writes.Go(func() error { n.write(ctx, pod, ""); return nil })
	}
	n.nominateDue(ctx)
}

// choice is a pod to nominate, and its node; empty if no node was chosen.
type choice struct {
	pod  *clustercache.PodInfo
	node string
}

// nominateDue nominates the pods that are due. Pods for which that isn't possible are requeued, since no pod was evicted for them.
func (n *Nominator) nominateDue(ctx context.Context) {
	due, givenUp := n.takeDue()
	n.choose(due)
	for i := range due {
		givenUp = n.recordChoice(&due[i]) || givenUp
	}
	for _, c := range due { // This loop waits if the API server is slow, so every choice is recorded before it.
		if c.node != "" {
			n.writes.Go(func() error { n.write(ctx, c.pod, c.node); return nil })
		}
	}
	if givenUp {
		n.Requeue("")
	}
}

// choose chooses the nodes of the single pods: the place that fair sharing has granted, or a node that has room.
func (n *Nominator) choose(due []choice) {
	var single []*choice
	var requests []ledger.Request
	for i := range due {
		c := &due[i]
		if c.node == "" {
			c.node, _, _ = n.Ledger.Lookup(c.pod.UID)
		}
		if c.node == "" && !n.Ledger.NeedsTurn(c.pod.Pod) {
			single, requests = append(single, c), append(requests, ledger.Request{Pod: c.pod.Pod, Nodes: n.Nodes.UsableNodes(c.pod.Constraints)})
		}
	}
	if len(single) == 0 {
		return
	}
	view := n.View
	view.TentativeAt = n.Clock.Now()
	for i, node := range n.Ledger.NominateAll(requests, view) {
		single[i].node = node
	}
}

// recordChoice records the node that was chosen for a pod, and removes it from the choice if the pod isn't to be nominated any more. If no node has
// room, nominations don't help the pod, and recordChoice returns true.
func (n *Nominator) recordChoice(c *choice) (givenUp bool) {
	n.mu.Lock()
	p := n.pods[c.pod.UID]
	wanted := p != nil && p.state == writing
	if wanted {
		p.node = c.node
		if c.node == "" {
			p.state = done
			n.giveUp(c.pod)
		}
	}
	n.mu.Unlock()
	if wanted {
		return c.node == ""
	}
	// The pod was bound or deleted meanwhile, or kube-scheduler has nominated it.
	if pod, pending := n.Cache.PendingPod(c.pod.UID); !pending || pod.NominatedNode == "" {
		n.Ledger.End(ledger.Nominated, string(c.pod.UID))
	}
	c.node = ""
	return false
}

// write writes the nomination of the pod, or removes it if node is empty.
func (n *Nominator) write(ctx context.Context, pod *clustercache.PodInfo, node string) {
	if n.Leading() != nil || ctx.Err() != nil || node != "" && !n.mayWrite(pod.UID) {
		n.drop(pod.UID)
		return
	}
	switch done := n.send(ctx, pod, node); {
	case node == "": // If the removal failed, it is tried again.
	case done:
		n.Requeue(node)
	default:
		n.drop(pod.UID)
	}
}

// send performs one write, and reports whether it succeeded.
func (n *Nominator) send(ctx context.Context, pod *clustercache.PodInfo, node string) bool {
	n.Observer.APIWrite("nomination")
	err := n.API.Nominate(ctx, pod.Pod, pod.GetObjectMeta().GetResourceVersion(), node)
	result := reasons.ResultMade
	switch {
	case err == nil && node == "":
		result = reasons.ResultRemoved
	case apierrors.IsConflict(err) || apierrors.IsNotFound(err) || apierrors.IsInvalid(err): // It was tried, bound or deleted meanwhile.
		result = reasons.ResultConflict
	case err != nil:
		result = reasons.ResultFailed
		klog.FromContext(ctx).Error(err, "Pod not nominated to a node outside the sample, pausing", "pod", klog.KRef(pod.Namespace, pod.Name), "pause", queue.Retry)
		n.mu.Lock()
		n.paused = n.Clock.Now().Add(queue.Retry)
		n.mu.Unlock()
	}
	n.Observer.Nominated(result)
	return err == nil
}

// mayWrite reports whether the chosen node of a pod is still to be written: no write failed while this one waited for others.
func (n *Nominator) mayWrite(uid gpu.PodUID) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.pods[uid]
	return p != nil && p.state == writing && !n.Clock.Now().Before(n.paused)
}

// drop removes the ledger's nomination of a pod, unless the watch has shown it. If the write takes effect later, the watch restores the
// nomination.
func (n *Nominator) drop(uid gpu.PodUID) {
	n.mu.Lock()
	p := n.pods[uid]
	dropped := p != nil && p.state == writing
	if dropped {
		p.state = done
	}
	n.mu.Unlock()
	if dropped {
		n.Ledger.End(ledger.Nominated, string(uid))
	}
}

// dropUnreported drops the nominations that the watch should have shown by now.
func (n *Nominator) dropUnreported() {
	n.mu.Lock()
	var unseen []gpu.PodUID
	for uid, p := range n.pods {
		if p.state == writing && n.Clock.Since(p.at) > n.AnswerLost {
			unseen = append(unseen, uid)
		}
	}
	n.mu.Unlock()
	for _, uid := range unseen {
		n.drop(uid)
	}
}

// expired returns the pods whose nomination is to be removed, because memory is reserved for the pod meanwhile: kube-scheduler removes a nomination
// if the pod fits nowhere and may preempt (k8s.io/kubernetes pkg/scheduler/framework/preemption, Preempt), but it may not retry the pod for a long
// time. While pods leave the node, kube-scheduler may have nominated the pod there for a preemption. A removal that fails is tried again.
func (n *Nominator) expired() (pods []*clustercache.PodInfo) {
	n.mu.Lock()
	defer n.mu.Unlock()
	now := n.Clock.Now()
	for uid, p := range n.pods {
		pod, pending := n.Cache.PendingPod(uid)
		if !pending || p.state != nominated || now.Sub(p.at) <= queue.ArrivalTimeout {
			continue
		}
		if !slices.ContainsFunc(n.Cache.PodsOn(p.node), func(other *clustercache.PodInfo) bool { return other.Leaving && other.Priority < pod.Priority }) {
			p.at = now
			pods = append(pods, pod)
		}
	}
	return pods
}

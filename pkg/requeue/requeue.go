// Package requeue makes kube-scheduler retry pods.
//
// kube-scheduler retries a rejected pod after a change of the cluster that may help the pod, or after five minutes. Sometimes
// a retry would succeed sooner than that, for a reason that kube-scheduler can't see:
//
//   - the extender saw freed memory later than kube-scheduler (see Requeuer; the ledger calls Freed);
//   - kube-scheduler sent only some nodes, or filter named only some (see RetrySamples);
//   - a gang may be placed now, or a pod's turn by fair sharing has come (see RequeueAll);
//   - a gang became whole, whose members a pod of higher priority can preempt now (see Preemptible);
//   - another extender may have rejected the pod before this one became the leader (see RequeueAll);
//   - the pod was limited to one node by an unconfirmed bind that has failed (see Unrestricted).
//
// The means is always the same: a change of an annotation of one node requeues every rejected pod.
package requeue

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"
	"unique"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/background"
	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/queue"
)

const (
	// freedDelay is the time between the release of memory and the requeue. kube-scheduler usually sees the same change
	// and retries at once; then no requeue is needed.
	freedDelay = 300 * time.Millisecond
	// writeInterval is the minimum time between two writes that requeue pods, and between two rounds of attempts.
	writeInterval = time.Second
	// maxRejected limits the remembered rejections, so that requests for pods that do not exist cannot exhaust memory.
	// It is far above the number of pending pods in a large cluster.
	maxRejected = 100_000
)

// Options configure a Requeuer.
type Options struct {
	API interface {
		AnnotateNode(ctx context.Context, node, key, value string) error
	}
	Ledger Ledger
	Cache  Cache
	// EligibleNodes returns the nodes that pods with the constraints can use, independent of their free memory. It is called for every pod that
	// is rejected on a sample. The result isn't changed.
	EligibleNodes func(constraints unique.Handle[string]) []string
	Observer      Observer
	// Leading returns an error if another process does this work.
	Leading func() error
	Clock   clock.WithTicker
	// MinSample replaces minFeasibleNodesToFind in tests, if it is positive.
	MinSample int
}

// Observer receives what metrics count. Its methods must return at once.
type Observer interface {
	// Requeued counts the writes that made kube-scheduler retry rejected pods.
	Requeued()
	// APIWrite counts the writes to nodes ("node").
	APIWrite(kind string)
}

// Ledger is the part of package ledger that a Requeuer uses.
type Ledger interface {
	FirstFit(pod gpu.Pod, nodes []string) (node string, ok bool)
	HasReservation(uid gpu.PodUID) bool
	NeedsTurn(pod gpu.Pod) bool
}

// Cache is the part of package clustercache that a Requeuer uses.
type Cache interface {
	Nodes() []*corev1.Node
	PendingPod(uid gpu.PodUID) (*clustercache.PodInfo, bool)
}

// Requeuer requeues pods that the extender rejected because it saw a change later than kube-scheduler. kube-scheduler
// retries a pod as soon as it sees that memory comes free. If the extender's watch lags and the pod is rejected again,
// kube-scheduler has no reason for a third attempt for minutes. Therefore, when memory comes free that a rejected pod
// could use, Requeuer changes an annotation of that node, and kube-scheduler retries the pod. Its methods are safe for
// concurrent use; mu guards the fields below it.
type Requeuer struct {
	Options
	limit *rate.Limiter
	work  background.Signal

	mu       sync.Mutex
	rejected map[gpu.PodUID]rejection
	// tried are the pods of attempts.go.
	tried map[gpu.PodUID]triedPod
	// freed are the nodes that the next round checks, with the revision of their last change.
	freed map[string]uint64
	// revision counts the changes by which rejected pods may fit. A filter call that is in progress may have missed them. preemptible is the
	// revision of the last one by which pods may fit by preempting others.
	revision, preemptible uint64
	// requested is true if RequeueAll was called, and requestedNode is the node that it set.
	requested     bool
	requestedNode string
}

// rejection is a rejected pod.
type rejection struct {
	pod gpu.Pod
	// seen is the revision when filter read the ledger, and at is when the rejection was recorded.
	seen uint64
	at   time.Time
}

// New returns a Requeuer. It writes nothing before Run.
func New(o Options) *Requeuer {
	return &Requeuer{
		Options:  o,
		limit:    rate.NewLimiter(rate.Every(writeInterval), 1),
		work:     background.NewSignal(),
		rejected: map[gpu.PodUID]rejection{}, tried: map[gpu.PodUID]triedPod{}, freed: map[string]uint64{},
	}
}

// Run requeues pods when needed until ctx ends.
func (r *Requeuer) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return background.Every(ctx, r.Clock, writeInterval, func(context.Context) { r.RetrySamples() })
	})
	g.Go(func() error { return r.run(ctx) })
	return g.Wait()
}

// Rejected records that filter found no node for the pod among the candidate nodes of one call. They may be only some of the
// feasible ones; if another node has room, the pod is requeued soon. seen is what Revision returned before filter read the ledger: later
// changes may have been handled without this pod.
func (r *Requeuer) Rejected(pod gpu.Pod, candidates []string, seen uint64) {
	r.mu.Lock()
	if len(candidates) >= cmp.Or(r.MinSample, minFeasibleNodesToFind) {
		r.handle(pod.UID, noneInSample, len(candidates))
	}
	makeRoom(r.rejected)
	r.rejected[pod.UID] = rejection{pod, seen, r.Clock.Now()}
	missed, preemptible := r.revision > seen, r.preemptible > seen
	r.mu.Unlock()
	if preemptible {
		r.RequeueAll("")
	} else if missed {
		if node, fits := r.Ledger.FirstFit(pod, candidates); fits {
			r.Freed(node)
		}
	}
}

// Revision returns the number of changes so far by which rejected pods may fit, see Rejected.
func (r *Requeuer) Revision() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.revision
}

// Passed records that filter found a node for the pod. partly is true if filter named only some of the nodes that fit: then a
// bind must follow, or the next call names all.
func (r *Requeuer) Passed(uid gpu.PodUID, partly bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.rejected, uid)
	e := passed
	if partly {
		e = passedPartly
	}
	r.handle(uid, e, 0)
}

// NameAll reports whether filter must name every node that fits the pod, because no bind followed the call in which it
// named only some. If it returns true it notes that, and returns true until the pod's next bind.
func (r *Requeuer) NameAll(uid gpu.PodUID) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	state := r.handle(uid, called, 0)
	return state == allNamed || state == sampledAll
}

// BindStarted records that a bind call for the pod has arrived.
func (r *Requeuer) BindStarted(uid gpu.PodUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.handle(uid, ended, 0)
}

// Forget removes the pod: it is bound or gone.
func (r *Requeuer) Forget(uid gpu.PodUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.rejected, uid)
	r.handle(uid, ended, 0)
}

// ForgetRejection removes the rejection of a pod that something else requeues.
func (r *Requeuer) ForgetRejection(uid gpu.PodUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.rejected, uid)
}

// makeRoom removes any pod if the map has maxRejected pods. With so many, most are not pending pods.
func makeRoom[V any](pods map[gpu.PodUID]V) {
	for uid := range pods {
		if len(pods) < maxRejected {
			return
		}
		delete(pods, uid)
	}
}

// Freed records that memory of the node came free.
func (r *Requeuer) Freed(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.revision++
	r.freed[node] = r.revision
	r.work.Raise()
}

// Preemptible requeues the rejected pods if one of them has a higher priority than a gang that is bound now. Memory that is reserved for a
// gang cannot be evicted: such a pod was rejected without a victim, and kube-scheduler has no reason to retry it when the gang is bound.
func (r *Requeuer) Preemptible(priority int32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.revision++
	r.preemptible = r.revision
	for _, rejected := range r.rejected {
		if rejected.pod.Priority > priority {
			r.request("")
			return
		}
	}
}

// Unrestricted requeues the pod if it was rejected while it was limited to one node. It may go to any node again.
func (r *Requeuer) Unrestricted(uid gpu.PodUID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.revision++
	if _, rejected := r.rejected[uid]; rejected {
		r.request("")
	}
}

// RequeueAll requests a requeue of every rejected pod by a change of the node. An empty node means any node.
func (r *Requeuer) RequeueAll(node string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.request(node)
}

// request is RequeueAll. The caller holds mu.
func (r *Requeuer) request(node string) {
	r.requested, r.requestedNode = true, node
	r.work.Raise()
}

// takeRequest returns and clears the node that RequeueAll set. It returns false if there is none, or no node to change.
func (r *Requeuer) takeRequest() (node string, requested bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.requested {
		return "", false
	}
	r.requested, node = false, r.requestedNode
	if nodes := r.Cache.Nodes(); node == "" && len(nodes) > 0 {
		node = nodes[0].Name
	}
	return node, node != ""
}

// run requeues pods when needed until ctx ends.
func (r *Requeuer) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-r.work:
		}
		now := r.Clock.Now()
		select {
		case <-ctx.Done():
			return nil
		case <-r.Clock.After(max(freedDelay, r.limit.ReserveN(now, 1).DelayFrom(now))):
		}
		r.Requeue(ctx)
	}
}

// Requeue makes one round of Run: it changes the annotation of one node if that helps a pod. One change requeues every
// rejected pod.
func (r *Requeuer) Requeue(ctx context.Context) {
	node, requested := r.takeRequest()
	var pod gpu.Pod
	if !requested {
		node, pod = r.reason()
	}
	if node == "" {
		return
	}
	if r.Leading() != nil {
		r.RequeueAll("") // The pods that this replica rejected are requeued in its next term, or the next leader receives their filter calls.
		return
	}
	logger := klog.FromContext(ctx).WithValues("node", node, "pod", klog.KRef(pod.Namespace, pod.Name))
	r.forgetRejections() // kube-scheduler retries the pods that were rejected before the write.
	err := r.API.AnnotateNode(ctx, node, protocol.AnnotationFreed, r.Clock.Now().UTC().Format(time.RFC3339Nano))
	r.Observer.APIWrite("node")
	if err != nil {
		logger.Error(err, "Rejected pods not requeued, trying again with any node")
		r.RequeueAll("") // This node may be gone. The cache returns the nodes in random order, so if one refuses every write, others are tried.
		return
	}
	logger.Info("Requeued the rejected pods", "requested", requested)
	r.Observer.Requeued()
}

func (r *Requeuer) forgetRejections() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.rejected)
}

// reason returns a node on which memory came free after filter read the ledger and rejected a pod that fits it now. It drops nodes that
// help no pod, most of them after one check, however many pods are pending.
func (r *Requeuer) reason() (node string, pod gpu.Pod) {
	rejected, freed := r.takeFreed()
	if len(rejected) == 0 {
		return "", gpu.Pod{}
	}
	slices.SortFunc(rejected, func(a, b rejection) int { return cmp.Compare(a.pod.Request, b.pod.Request) })
	pods := make([]gpu.Pod, len(rejected))
	for i := range rejected {
		pods[i] = rejected[i].pod
	}
	least := leastOf(r.Ledger, pods)
	for _, node := range slices.Sorted(maps.Keys(freed)) {
		if !least.fit(node) {
			continue
		}
		for _, old := range rejected {
			if old.seen < freed[node] && fits(r.Ledger, old.pod, node) {
				return node, old.pod
			}
		}
	}
	return "", gpu.Pod{}
}

// takeFreed returns the rejections, and takes the nodes on which memory came free.
func (r *Requeuer) takeFreed() (rejected []rejection, freed map[string]uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := r.Clock.Now()
	maps.DeleteFunc(r.rejected, func(_ gpu.PodUID, old rejection) bool { return now.Sub(old.at) > queue.KubeSchedulerRetries })
	freed, r.freed = r.freed, map[string]uint64{}
	return slices.Collect(maps.Values(r.rejected)), freed
}

package cluster

import (
	"cmp"
	"context"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

const (
	// wakeDelay is the time between the release of memory and the requeue. kube-scheduler usually sees the same change
	// and retries at once; then no requeue is needed.
	wakeDelay = 300 * time.Millisecond
	// wakeInterval is the minimum time between two writes that requeue pods.
	wakeInterval = time.Second
	// refusalLife is how long a rejection is remembered. kube-scheduler retries every rejected pod after five minutes
	// (pkg/scheduler/backend/queue, DefaultPodMaxInUnschedulablePodsDuration).
	refusalLife = 6 * time.Minute
	// maxRefused limits the remembered rejections, so that requests for pods that do not exist cannot exhaust memory.
	// It is far above the number of pending pods in a large cluster.
	maxRefused  = 100_000
	wakeTimeout = 5 * time.Second
)

// waker requeues pods that the extender rejected because it saw a change later than kube-scheduler. kube-scheduler
// retries a pod as soon as it sees that memory comes free. If the extender's watch lags and the pod is rejected again,
// kube-scheduler has no reason for a third attempt for minutes. Therefore, when memory comes free that a rejected pod
// could use, waker changes an annotation of that node, and kube-scheduler retries the pod. Its methods are safe for
// concurrent use; mu guards the fields below it.
type waker struct {
	clock    clock.WithTicker
	api      API
	observer Observer
	// fits reports whether the pod would find a card on the node now.
	fits func(pod gpu.Pod, node string) bool
	// anyFit returns a node on which the pod would find a card now, if there is one.
	anyFit func(pod gpu.Pod) (node string, ok bool)
	// leading returns an error if another process does this work.
	leading func() error
	// anyNode returns the name of any node, or "" if there is none.
	anyNode func() string
	limit   *rate.Limiter
	work    chan struct{}

	mu      sync.Mutex
	refused map[gpu.PodUID]refusal
	freedAt map[string]time.Time
	// called is a node to change regardless of which pods that helps, see call.
	called *string
}

type refusal struct {
	pod gpu.Pod
	at  time.Time
}

func newWaker(c clock.WithTicker, api API, o Observer, fits func(gpu.Pod, string) bool, anyFit func(gpu.Pod) (string, bool), leading func() error) *waker {
	return &waker{
		clock: c, api: api, observer: o, fits: fits, anyFit: anyFit, leading: leading,
		limit:   rate.NewLimiter(rate.Every(wakeInterval), 1),
		work:    make(chan struct{}, 1),
		refused: map[gpu.PodUID]refusal{}, freedAt: map[string]time.Time{},
	}
}

// Refused records that filter found no node for the pod. at is when filter read the ledger.
func (c *Cluster) Refused(pod gpu.Pod, at time.Time) { c.waker.refuse(pod, at) }

// Passed records that filter found a node for the pod.
func (c *Cluster) Passed(uid gpu.PodUID) {
	c.waker.forget(uid)
	c.attempts.passed(uid)
	c.evictor.passed(uid)
}

func (c *Cluster) fits(pod gpu.Pod, node string) bool { return c.fitsAny(pod, []string{node}) }

// fitsAny reports whether the pod would find a card on one of the nodes.
func (c *Cluster) fitsAny(pod gpu.Pod, nodes []string) (fits bool) {
	c.ledger.Check(pod, nodes, func(_ string, reason placement.Reason) { fits = fits || reason == placement.Fits })
	return fits
}

// inheritRefusals treats every pending pod as rejected. Which pods a former extender rejected, and for which of them
// memory has come free since, was lost with that process.
func (c *Cluster) inheritRefusals() {
	pending, _ := c.pending.list(0)
	pods := make([]gpu.Pod, len(pending))
	for i := range pending {
		pods[i] = pending[i].Pod
	}
	c.waker.inherit(pods)
}

func (w *waker) refuse(pod gpu.Pod, at time.Time) {
	w.note(pod, at)
	if w.clock.Since(at) < wakeDelay {
		return
	}
	// The machine is overloaded: memory that came free after filter read the ledger may have been handled meanwhile,
	// without this pod.
	if node, ok := w.anyFit(pod); ok {
		w.freed(node)
	}
}

func (w *waker) note(pod gpu.Pod, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, again := w.refused[pod.UID]; !again && len(w.refused) >= maxRefused {
		for uid := range w.refused {
			delete(w.refused, uid) // Any of them: with so many, most are not pending pods.
			break
		}
	}
	w.refused[pod.UID] = refusal{pod, at}
}

// inherit records pods that another extender may have rejected, and checks whether one of them fits a node already.
func (w *waker) inherit(pods []gpu.Pod) {
	if len(pods) == 0 {
		return
	}
	before := w.clock.Now().Add(-time.Nanosecond) // Memory that comes free from now on counts as later.
	w.mu.Lock()
	for _, pod := range pods {
		if _, again := w.refused[pod.UID]; !again {
			w.refused[pod.UID] = refusal{pod, before}
		}
	}
	w.mu.Unlock()
	if node, ok := w.anyFit(leastOf(pods)); ok {
		w.call(node) // Another node may be the one that fits, but one change requeues every pod.
	}
}

// leastOf returns a pod that fits wherever one of the pods fits. It has the smallest request, and only nominations that
// every pod respects count against it.
func leastOf(pods []gpu.Pod) gpu.Pod {
	least := gpu.Pod{Request: pods[0].Request, Priority: math.MinInt32}
	for _, pod := range pods {
		least.Request, least.Priority = min(least.Request, pod.Request), max(least.Priority, pod.Priority)
	}
	if least.Priority < math.MaxInt32 {
		least.Priority++ // A pod ignores its own nomination, which has its own priority.
	}
	return least
}

func (w *waker) forget(uid gpu.PodUID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.refused, uid)
}

// freed records that memory of the node came free.
func (w *waker) freed(node string) {
	w.mu.Lock()
	w.freedAt[node] = w.clock.Now()
	w.mu.Unlock()
	w.signal()
}

// signal makes run check for a reason to write.
func (w *waker) signal() {
	select {
	case w.work <- struct{}{}:
	default: // A signal is pending already.
	}
}

// outranks reports whether a pod of higher priority was rejected. Memory that is reserved for a gang cannot be evicted:
// such a pod was rejected without a victim, and kube-scheduler has no reason to retry it when the gang is bound.
func (w *waker) outranks(priority int32) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.refused {
		if r.pod.Priority > priority {
			return true
		}
	}
	return false
}

// call requests a requeue of every rejected pod by a change of the node. An empty node means any node.
func (w *waker) call(node string) {
	w.mu.Lock()
	w.called = &node
	w.mu.Unlock()
	w.signal()
}

// takeCall returns and clears the node that call set.
func (w *waker) takeCall() (node string, called bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.called == nil {
		return "", false
	}
	node, w.called = *w.called, nil
	if node == "" && w.anyNode != nil {
		node = w.anyNode()
	}
	return node, node != ""
}

// released records that the pod, which was limited to one node for a while, may go to any node again.
func (w *waker) released(uid gpu.PodUID) {
	w.mu.Lock()
	r, ok := w.refused[uid]
	w.mu.Unlock()
	if !ok {
		return
	}
	if node, ok := w.anyFit(r.pod); ok {
		w.freed(node)
	}
}

// run requeues pods when needed until ctx ends.
func (w *waker) run(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-w.work:
		}
		now := w.clock.Now()
		select {
		case <-ctx.Done():
			return nil
		case <-w.clock.After(max(wakeDelay, w.limit.ReserveN(now, 1).DelayFrom(now))):
		}
		w.wake(ctx)
	}
}

// wake changes the annotation of one node if that helps a pod. One change requeues every rejected pod.
func (w *waker) wake(ctx context.Context) {
	node, called := w.takeCall()
	var pod gpu.Pod
	again := func() { w.call("") }
	if !called {
		var freed map[string]time.Time
		node, pod, freed = w.reason()
		again = func() { w.freedAgain(freed) }
	}
	if node == "" {
		return
	}
	if w.leading() != nil {
		// The pods that this replica rejected are requeued in its next term, or the next leader receives their filter calls.
		again()
		return
	}
	logger := klog.FromContext(ctx).WithValues("node", node, "pod", klog.KRef(pod.Namespace, pod.Name))
	ctx, cancel := context.WithTimeout(ctx, wakeTimeout)
	defer cancel()
	at := w.clock.Now()
	err := w.api.AnnotateNode(ctx, node, protocol.AnnotationFreed, at.UTC().Format(time.RFC3339Nano))
	w.observer.APIWrite("node")
	if err != nil {
		logger.Error(err, "Waking the scheduling queue failed, trying again")
		again()
		return
	}
	logger.Info("The scheduling queue is woken", "whoeverWaits", called)
	w.observer.Requeued()
	w.woken(at)
}

// reason returns a node on which memory came free after the rejection of a pod that fits it now. It drops nodes that
// help no pod, most of them after one check, however many pods are pending. freed are all nodes with freed memory that
// it took: one write requeues every pod, so if that write fails, all of them must be considered again, see freedAgain.
func (w *waker) reason() (node string, pod gpu.Pod, freed map[string]time.Time) {
	w.mu.Lock()
	now := w.clock.Now()
	maps.DeleteFunc(w.refused, func(_ gpu.PodUID, r refusal) bool { return now.Sub(r.at) > refusalLife })
	refused, freedAt := slices.Collect(maps.Values(w.refused)), w.freedAt
	w.freedAt = map[string]time.Time{}
	w.mu.Unlock()
	if len(refused) == 0 {
		return "", gpu.Pod{}, nil
	}

	slices.SortFunc(refused, func(a, b refusal) int { return cmp.Compare(a.pod.Request, b.pod.Request) })
	pods := make([]gpu.Pod, len(refused))
	for i, r := range refused {
		pods[i] = r.pod
	}
	least := leastOf(pods)
	for node, freed := range freedAt {
		if !w.fits(least, node) {
			continue
		}
		for _, r := range refused {
			if r.at.Before(freed) && w.fits(r.pod, node) {
				return node, r.pod, freedAt
			}
		}
	}
	return "", gpu.Pod{}, nil
}

// freedAgain restores nodes with freed memory that reason took. If more memory of a node came free meanwhile, the later
// time is kept.
func (w *waker) freedAgain(nodes map[string]time.Time) {
	w.mu.Lock()
	for node, at := range nodes {
		if at.After(w.freedAt[node]) {
			w.freedAt[node] = at
		}
	}
	w.mu.Unlock()
	w.signal()
}

// woken deletes the rejections from before the write: kube-scheduler retries their pods, and filter rejects them again
// if necessary.
func (w *waker) woken(at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.refused, func(_ gpu.PodUID, r refusal) bool { return r.at.Before(at) })
}

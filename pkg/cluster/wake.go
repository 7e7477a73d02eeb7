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
	// wakeDelay is how long freed memory waits before anybody is woken: kube-scheduler mostly sees the same change
	// itself and asks again at once, and then there is nothing to do.
	wakeDelay = 300 * time.Millisecond
	// wakeInterval is the least time between two writes that wake the queue.
	wakeInterval = time.Second
	// refusalLife is how long a refusal is remembered. kube-scheduler looks at every refused pod again after five
	// minutes (pkg/scheduler/backend/queue, DefaultPodMaxInUnschedulablePodsDuration).
	refusalLife = 6 * time.Minute
	// maxRefused bounds the refusals that are remembered, far above what waits in a large cluster: who asks for pods that
	// don't exist doesn't fill the memory.
	maxRefused  = 100_000
	wakeTimeout = 5 * time.Second
)

// waker sees to it that no pod stays refused because the extender saw a change later than kube-scheduler did. The
// scheduler asks again as soon as it sees memory come free; when the extender, whose watch lags, refuses once more,
// nothing would make the scheduler ask a third time for minutes. So when memory comes free that a pod refused before
// could use, an annotation of that node is changed, which kube-scheduler takes as a reason to look again.
type waker struct {
	clock    clock.WithTicker
	api      API
	observer Observer
	// fits says whether the pod would find a card on the node now.
	fits func(pod gpu.Pod, node string) bool
	// anyFit returns a node on which the pod would find a card now, if there is one.
	anyFit func(pod gpu.Pod) (node string, ok bool)
	// leading returns an error where another process does this work.
	leading func() error
	// anyNode returns the name of some node, or "".
	anyNode func() string
	limit   *rate.Limiter
	work    chan struct{}

	mu      sync.Mutex
	refused map[gpu.PodUID]refusal
	freedAt map[string]time.Time
	// called is a node that is to be changed whomever that helps, see call.
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

// Refused notes that filter, which looked at the ledger at the given time, found no node for the pod.
func (c *Cluster) Refused(pod gpu.Pod, at time.Time) { c.waker.refuse(pod, at) }

// Passed notes that filter found a node for the pod.
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

// inheritRefusals takes every pod that waits for one that was refused: whom an extender before this one refused, and
// whether for memory that has come free since, died with it.
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
	// On a machine with no time to spare. What came free since filter looked may have been looked into meanwhile, without
	// this pod.
	if node, ok := w.anyFit(pod); ok {
		w.freed(node)
	}
}

func (w *waker) note(pod gpu.Pod, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, again := w.refused[pod.UID]; !again && len(w.refused) >= maxRefused {
		for uid := range w.refused {
			delete(w.refused, uid) // Whichever: among so many it hardly is one that waits.
			break
		}
	}
	w.refused[pod.UID] = refusal{pod, at}
}

// inherit notes pods that others may have refused, and looks whether there is room for one of them already.
func (w *waker) inherit(pods []gpu.Pod) {
	if len(pods) == 0 {
		return
	}
	before := w.clock.Now().Add(-time.Nanosecond) // What is freed from now on came after.
	w.mu.Lock()
	for _, pod := range pods {
		if _, again := w.refused[pod.UID]; !again {
			w.refused[pod.UID] = refusal{pod, before}
		}
	}
	w.mu.Unlock()
	if node, ok := w.anyFit(leastOf(pods)); ok {
		w.call(node) // Perhaps none of them fits just there, but on another node.
	}
}

// leastOf returns a pod that fits wherever one of the pods does: it asks for the least, and none of those that the pods
// don't stand back for goes before it.
func leastOf(pods []gpu.Pod) gpu.Pod {
	least := gpu.Pod{Request: pods[0].Request, Priority: math.MinInt32}
	for _, pod := range pods {
		least.Request, least.Priority = min(least.Request, pod.Request), max(least.Priority, pod.Priority)
	}
	if least.Priority < math.MaxInt32 {
		least.Priority++ // A pod doesn't stand back for its own nomination.
	}
	return least
}

func (w *waker) forget(uid gpu.PodUID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.refused, uid)
}

// freed notes that memory of the node came free.
func (w *waker) freed(node string) {
	w.mu.Lock()
	w.freedAt[node] = w.clock.Now()
	w.mu.Unlock()
	w.signal()
}

// signal makes run look for a reason to write.
func (w *waker) signal() {
	select {
	case w.work <- struct{}{}:
	default: // Work is waiting already.
	}
}

// outranks says whether a pod of higher priority was refused. What is reserved for a group can't be evicted: such a pod was
// refused without a victim, and kube-scheduler sees no reason to look again when the group is bound.
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

// call wants the queue woken, whoever waits in it, by a change of the node, or of any where it is empty.
func (w *waker) call(node string) {
	w.mu.Lock()
	w.called = &node
	w.mu.Unlock()
	w.signal()
}

// takeCall returns the node that call named.
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

// released notes that the pod, which for a while could go to one node only, may go to any again.
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

// run wakes the queue where needed until ctx ends.
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

// wake changes the annotation of one node, if that helps anybody: one change wakes every refused pod.
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
		again() // Whom this replica refused while it led waits for its next term, or asks the next leader.
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

// reason returns a node on which memory came free after a pod that it would fit had been refused. Nodes that help
// nobody are done with, most of them by one look, however many pods wait. freed are all nodes with freed memory that it took:
// one write requeues every pod, so if that write fails, all of them must be considered again, see freedAgain.
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

// freedAgain puts back nodes with freed memory that reason took, except where more came free since.
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

// woken forgets the refusals from before: their pods are asked about anew, and refused anew where need be.
func (w *waker) woken(at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.refused, func(_ gpu.PodUID, r refusal) bool { return r.at.Before(at) })
}

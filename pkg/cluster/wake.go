package cluster

import (
	"context"
	"maps"
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
	// anyFit returns a node on which the pod would find a card now, or "".
	anyFit func(pod gpu.Pod) string
	// leading returns an error where another process does this work.
	leading func() error
	limit   *rate.Limiter
	work    chan struct{}

	mu      sync.Mutex
	refused map[gpu.PodUID]refusal
	freedAt map[string]time.Time
}

type refusal struct {
	pod gpu.Pod
	at  time.Time
}

func newWaker(c clock.WithTicker, api API, o Observer, fits func(gpu.Pod, string) bool, anyFit func(gpu.Pod) string, leading func() error) *waker {
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
func (c *Cluster) Passed(uid gpu.PodUID) { c.waker.forget(uid) }

func (c *Cluster) fits(pod gpu.Pod, node string) (fits bool) {
	c.ledger.Check(pod, []string{node}, func(_ string, reason placement.Reason) { fits = reason == placement.Fits })
	return fits
}

func (c *Cluster) anyFit(pod gpu.Pod) string {
	for _, node := range c.ledger.Nodes() {
		if c.fits(pod, node.Name) {
			return node.Name
		}
	}
	return ""
}

func (w *waker) refuse(pod gpu.Pod, at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.refused[pod.UID] = refusal{pod, at}
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
	select {
	case w.work <- struct{}{}:
	default: // Work is waiting already.
	}
}

// released notes that the pod, which for a while could go to one node only, may go to any again.
func (w *waker) released(uid gpu.PodUID) {
	w.mu.Lock()
	r, ok := w.refused[uid]
	w.mu.Unlock()
	if !ok {
		return
	}
	if node := w.anyFit(r.pod); node != "" {
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
	node, pod := w.reason()
	if node == "" {
		return
	}
	if w.leading() != nil {
		w.freed(node) // Whom this replica refused while it led waits for its next term, or asks the next leader.
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
		w.freed(node)
		return
	}
	logger.Info("GPU memory came free that a refused pod can use: the scheduling queue is woken")
	w.observer.Woken()
	w.woken(at)
}

// reason returns a node on which memory came free after a pod that it would fit had been refused. Nodes that help
// nobody are done with.
func (w *waker) reason() (string, gpu.Pod) {
	w.mu.Lock()
	now := w.clock.Now()
	maps.DeleteFunc(w.refused, func(_ gpu.PodUID, r refusal) bool { return now.Sub(r.at) > refusalLife })
	refused, freedAt := maps.Clone(w.refused), w.freedAt
	w.freedAt = map[string]time.Time{}
	w.mu.Unlock()

	for node, freed := range freedAt {
		for _, r := range refused {
			if r.at.Before(freed) && w.fits(r.pod, node) {
				return node, r.pod
			}
		}
	}
	return "", gpu.Pod{}
}

// woken forgets the refusals from before: their pods are asked about anew, and refused anew where need be.
func (w *waker) woken(at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	maps.DeleteFunc(w.refused, func(_ gpu.PodUID, r refusal) bool { return r.at.Before(at) })
}

package cluster

import (
	"context"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
)

const (
	// settleInterval is how often open binds are looked at.
	settleInterval = 500 * time.Millisecond
	// settleMargin is for the way to the API server and for etcd, see fence.
	settleMargin = 5 * time.Second
	// unseenAfter is how long a bind that succeeded may go unseen by the watch before it is looked up: a pod that came
	// and went while the watch was broken is never told of.
	unseenAfter = 30 * time.Second
	// lookupTimeout bounds one live read.
	lookupTimeout = 2 * time.Second
)

// The outcomes of binds whose answer was lost, as metrics label them. A pod is gone that was deleted or has ended.
const (
	OutcomeBound    = "bound"
	OutcomeNotBound = "not_bound"
	OutcomeGone     = "gone"
)

// settler knows every bind from its write until the watch has told what became of the pod, and finds out where the
// answer was lost. Until then the card stays reserved: freeing it on a guess could give it to two pods.
type settler struct {
	clock    clock.WithTicker
	api      API
	observer Observer
	ledger   *ledger.Ledger
	timeout  time.Duration
	// bound is told of a pod that turned out to be bound to the node after its answer had been lost, notBound of one
	// that may go to any node again: so far only one was offered to it.
	bound    func(pod gpu.Pod, node string)
	notBound func(gpu.PodUID)

	mu   sync.Mutex
	open map[gpu.PodUID]attempt
}

type attempt struct {
	pod   gpu.Pod
	node  string
	state attemptState
	// at is when the last write began or, of one that is unseen, when it was last looked up.
	at time.Time
	// lost says that an earlier write of this pod is open as well: a refusal of the last one doesn't settle it.
	lost bool
}

type attemptState int

const (
	inFlight attemptState = iota
	// answerLost: nobody knows whether the write was made.
	answerLost
	// unseen: the write was made, and the watch hasn't told of it yet.
	unseen
)

func newSettler(c clock.WithTicker, api API, o Observer, l *ledger.Ledger, bindTimeout time.Duration, bound func(gpu.Pod, string), notBound func(gpu.PodUID)) *settler {
	return &settler{
		clock: c, api: api, observer: o, ledger: l, timeout: bindTimeout, bound: bound, notBound: notBound,
		open: map[gpu.PodUID]attempt{},
	}
}

// fence is how long after its begin a write may still be made: it is sent within the timeout, and the API server stops
// when the same time has passed again since it came there.
func (s *settler) fence() time.Duration { return 2*s.timeout + settleMargin }

// begin notes that a write is about to be made. A pod without GPU memory holds nothing that could be settled.
func (s *settler) begin(pod gpu.Pod, node string) {
	if pod.Request == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, earlier := s.open[pod.UID]
	s.open[pod.UID] = attempt{pod: pod, node: node, at: s.clock.Now(), lost: earlier}
}

// committed notes that the write was made.
func (s *settler) committed(uid gpu.PodUID) {
	s.ledger.Confirm(uid)
	s.setState(uid, unseen)
}

// lost notes that the answer was lost. It says whether the bind is open: otherwise the watch was quicker.
func (s *settler) lost(uid gpu.PodUID) (open bool) { return s.setState(uid, answerLost) }

func (s *settler) setState(uid gpu.PodUID, state attemptState) (open bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, open := s.open[uid]
	if open {
		a.state = state
		s.open[uid] = a
	}
	return open
}

// abandoned notes that no write will be made, and gives the reservation back, unless an earlier write is still open.
func (s *settler) abandoned(uid gpu.PodUID) {
	s.mu.Lock()
	_, open := s.open[uid]
	s.mu.Unlock()
	if !open {
		s.ledger.Release(uid)
	}
}

// failed notes that the write was refused, and gives the reservation back, unless an earlier write is still open.
func (s *settler) failed(uid gpu.PodUID) {
	s.mu.Lock()
	a, ok := s.open[uid]
	if ok && a.lost {
		a.state = answerLost
		s.open[uid] = a
		s.mu.Unlock()
		return
	}
	delete(s.open, uid)
	s.mu.Unlock()
	s.ledger.Release(uid)
}

// found notes that a live read found the pod bound. Where the watch has told of it meanwhile, that is newer.
func (s *settler) found(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a, ok := s.open[gpu.PodUID(pod.UID)]; ok {
		s.enter(a, pod)
	}
}

// enter brings the ledger to what a live read found of a bound pod. It needs the lock. A pod that still runs stays
// open until the watch tells of it: were it to go while the watch is broken, nobody else would notice.
func (s *settler) enter(a attempt, pod *corev1.Pod) {
	if protocol.Terminal(pod) {
		delete(s.open, a.pod.UID)
		s.ledger.Remove(a.pod.UID)
		return
	}
	hold(s.ledger, pod)
	a.state, a.lost, a.at = unseen, false, s.clock.Now()
	s.open[a.pod.UID] = a
}

// seen notes that the watch has told what became of the pod. It is to be called before the ledger is brought to it, so
// that what a live read found earlier can't be entered afterwards. Where that settles a bind whose answer was lost,
// settled is to be told once the ledger knows.
func (s *settler) seen(uid gpu.PodUID) (a attempt, lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, open := s.open[uid]
	delete(s.open, uid)
	return a, open && a.state == answerLost
}

// settled tells how a bind turned out whose answer was lost. The ledger knows already.
func (s *settler) settled(logger klog.Logger, a attempt, outcome string) {
	logger.Info("A bind whose answer was lost is settled", "pod", klog.KRef(a.pod.Namespace, a.pod.Name), "node", a.node, "outcome", outcome)
	s.observer.BindResolved(outcome)
	switch outcome {
	case OutcomeBound:
		s.bound(a.pod, a.node)
	case OutcomeNotBound:
		s.notBound(a.pod.UID)
	}
}

// run looks open binds up until ctx ends.
func (s *settler) run(ctx context.Context) error {
	ticker := s.clock.NewTicker(settleInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
		for _, a := range s.due() {
			if !s.settle(ctx, a) {
				break // The API server can't be reached: the others would only wait for it one by one.
			}
		}
	}
}

// due returns the binds that are to be looked up now.
func (s *settler) due() []attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock.Now()
	var due []attempt
	for uid, a := range s.open {
		age := now.Sub(a.at)
		if a.state == inFlight && age > s.fence() {
			// Its goroutine would long have said so, were it still alive.
			a.state = answerLost
			s.open[uid] = a
		}
		if a.state == answerLost || a.state == unseen && age > unseenAfter {
			due = append(due, a)
		}
	}
	return due
}

// settle looks one bind up. It says whether the API server answered.
func (s *settler) settle(ctx context.Context, a attempt) bool {
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	// What a read doesn't show can have been written while it was under way: it tells of the moment it was begun.
	asked := s.clock.Now()
	pod, err := s.api.Pod(ctx, a.pod.Namespace, a.pod.Name)
	if err != nil && !apierrors.IsNotFound(err) {
		logger.V(2).Info("An open bind can't be looked up", "pod", klog.KRef(a.pod.Namespace, a.pod.Name), "err", err)
		return false
	}

	if outcome := s.conclude(a, pod, err, asked); outcome != "" && a.state == answerLost {
		s.settled(logger, a, outcome)
	}
	return true
}

// conclude brings the ledger to what a read found that was begun at that time. It returns the outcome, "" for none yet.
func (s *settler) conclude(a attempt, pod *corev1.Pod, err error, asked time.Time) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[a.pod.UID] != a {
		return "" // A newer attempt began, or the watch was quicker.
	}
	switch {
	case err != nil, gpu.PodUID(pod.UID) != a.pod.UID, protocol.Terminal(pod):
		delete(s.open, a.pod.UID)
		s.ledger.Remove(a.pod.UID)
		return OutcomeGone
	case pod.Spec.NodeName != "":
		s.enter(a, pod)
		return OutcomeBound
	case asked.Sub(a.at) > s.fence():
		delete(s.open, a.pod.UID)
		s.ledger.Release(a.pod.UID)
		return OutcomeNotBound
	default:
		return "" // Not yet, which doesn't mean never: the write may still be on its way.
	}
}

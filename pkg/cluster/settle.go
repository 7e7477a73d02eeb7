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
	// settleInterval is how often unconfirmed binds are read.
	settleInterval = 500 * time.Millisecond
	// settleMargin allows for the network and for etcd, see fence.
	settleMargin = 5 * time.Second
	// unseenAfter is how long the watch may fail to report a successful bind before the pod is read. The watch never
	// reports a pod that came and went while it was broken.
	unseenAfter = 30 * time.Second
	// lookupTimeout bounds one live read.
	lookupTimeout = 2 * time.Second
)

// The outcomes of unconfirmed binds, as labels of metrics. A pod is gone if it was deleted or has ended.
const (
	OutcomeBound    = "bound"
	OutcomeNotBound = "not_bound"
	OutcomeGone     = "gone"
)

// settler tracks every bind from its write until the watch reports the pod, and resolves unconfirmed binds by live
// reads. Until then the card stays assumed: if it were released on a guess, two pods could get it.
type settler struct {
	clock    clock.WithTicker
	api      API
	observer Observer
	ledger   *ledger.Ledger
	timeout  time.Duration
	// bound is called for a pod whose unconfirmed bind turned out to have succeeded. notBound is called for a pod whose
	// unconfirmed bind turned out to have failed: until then the pod fits one node only, afterwards it may go to any
	// node.
	bound    func(pod gpu.Pod, node string)
	notBound func(gpu.PodUID)

	mu   sync.Mutex
	open map[gpu.PodUID]attempt
}

type attempt struct {
	pod   gpu.Pod
	node  string
	state attemptState
	// at is when the last write began. For an unseen bind that was read, it is the time of the last read.
	at time.Time
	// lost is true if an earlier write of this pod is open too. Then a refusal of the last write does not resolve the
	// bind.
	lost bool
}

type attemptState int

const (
	inFlight attemptState = iota
	// answerLost means that it is not known whether the write was made.
	answerLost
	// unseen means that the write was made and that the watch has not reported it yet.
	unseen
)

func newSettler(c clock.WithTicker, api API, o Observer, l *ledger.Ledger, bindTimeout time.Duration, bound func(gpu.Pod, string), notBound func(gpu.PodUID)) *settler {
	return &settler{
		clock: c, api: api, observer: o, ledger: l, timeout: bindTimeout, bound: bound, notBound: notBound,
		open: map[gpu.PodUID]attempt{},
	}
}

// fence returns how long after its begin a write may still be made. It is sent within the timeout, and the API server
// stops it when the same time has passed since its arrival.
func (s *settler) fence() time.Duration { return 2*s.timeout + settleMargin }

// begin records that a write is about to be made. A pod without GPU memory has no allocation to resolve.
func (s *settler) begin(pod gpu.Pod, node string) {
	if pod.Request == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, earlier := s.open[pod.UID]
	s.open[pod.UID] = attempt{pod: pod, node: node, at: s.clock.Now(), lost: earlier}
}

// committed records that the write was made.
func (s *settler) committed(uid gpu.PodUID) {
	s.ledger.Confirm(uid)
	s.setState(uid, unseen)
}

// lost records that the answer was lost. It returns false if the watch has reported the pod already.
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

// abandoned records that no write will be made. It releases the allocation unless an earlier write is still open.
func (s *settler) abandoned(uid gpu.PodUID) {
	s.mu.Lock()
	_, open := s.open[uid]
	s.mu.Unlock()
	if !open {
		s.ledger.Release(uid)
	}
}

// failed records that the write was refused. It releases the allocation unless an earlier write is still open.
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

// found records that a live read found the pod bound. If the watch has reported the pod meanwhile, the watch is newer
// and the read is ignored.
func (s *settler) found(pod *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a, ok := s.open[gpu.PodUID(pod.UID)]; ok {
		s.enter(a, pod)
	}
}

// enter updates the ledger with a bound pod that a live read found. The caller holds mu. A running pod stays open until
// the watch reports it: if the pod ended while the watch is broken, nothing else would detect that.
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

// seen records that the watch has reported the pod. Call it before the ledger is updated, so that the result of an
// earlier live read cannot be entered afterwards. If lost is true, the report resolves an unconfirmed bind: call
// settled once the ledger is updated.
func (s *settler) seen(uid gpu.PodUID) (a attempt, lost bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	a, open := s.open[uid]
	delete(s.open, uid)
	return a, open && a.state == answerLost
}

// settled reports the outcome of an unconfirmed bind. The ledger must be up to date already.
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

// run reads open binds until ctx ends.
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
				break // The API server is unreachable: each further read would only time out.
			}
		}
	}
}

// due returns the binds that must be read now.
func (s *settler) due() []attempt {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.clock.Now()
	var due []attempt
	for uid, a := range s.open {
		age := now.Sub(a.at)
		if a.state == inFlight && age > s.fence() {
			// If its goroutine were still running, it would have reported the outcome long ago.
			a.state = answerLost
			s.open[uid] = a
		}
		if a.state == answerLost || a.state == unseen && age > unseenAfter {
			due = append(due, a)
		}
	}
	return due
}

// settle reads the pod of one bind. It reports whether the API server answered.
func (s *settler) settle(ctx context.Context, a attempt) bool {
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	// The begin of the read counts: a write that the read does not show can have been made during the read.
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

// conclude updates the ledger with the result of a read that began at asked. It returns the outcome, or "" if there is
// none yet.
func (s *settler) conclude(a attempt, pod *corev1.Pod, err error, asked time.Time) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[a.pod.UID] != a {
		return "" // A newer attempt began, or the watch has reported the pod.
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
		return "" // Not bound yet: the write may still be under way.
	}
}

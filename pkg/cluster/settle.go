package cluster

import (
	"context"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

const (
	// settleInterval is how often open binds are looked at.
	settleInterval = 500 * time.Millisecond
	// settleMargin is how long after its deadline a write may still appear. The deadline travels with the request and
	// the API server stops there; the margin is for the way there and for etcd.
	settleMargin = 5 * time.Second
	// unseenAfter is how long a bind that succeeded may go unseen by the watch before it is looked up: a pod that came
	// and went while the watch was broken is never told of.
	unseenAfter = 30 * time.Second
	// lookupTimeout bounds one live read.
	lookupTimeout = 2 * time.Second
)

// The outcomes of binds whose answer was lost, as metrics label them.
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

	mu   sync.Mutex
	open map[gpu.PodUID]attempt
}

type attempt struct {
	pod   gpu.Pod
	node  string
	state attemptState
	// at is when the last write began.
	at time.Time
	// lost says that an earlier write of this pod had its answer lost: a refusal of a later one doesn't settle it.
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

func newSettler(c clock.WithTicker, api API, o Observer, l *ledger.Ledger, bindTimeout time.Duration) *settler {
	return &settler{clock: c, api: api, observer: o, ledger: l, timeout: bindTimeout, open: map[gpu.PodUID]attempt{}}
}

// begin notes that a write is about to be made. A pod without GPU memory holds nothing that could be settled.
func (s *settler) begin(pod gpu.Pod, node string) {
	if pod.Request == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	earlier := s.open[pod.UID]
	s.open[pod.UID] = attempt{pod: pod, node: node, at: s.clock.Now(), lost: earlier.lost || earlier.state == answerLost}
}

// committed notes that the write was made.
func (s *settler) committed(uid gpu.PodUID) {
	s.ledger.Commit(uid)
	s.setState(uid, unseen)
}

// lost notes that the answer was lost.
func (s *settler) lost(uid gpu.PodUID) { s.setState(uid, answerLost) }

func (s *settler) setState(uid gpu.PodUID, state attemptState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a, ok := s.open[uid]; ok { // Otherwise the watch was quicker.
		a.state = state
		s.open[uid] = a
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

// seen notes that the watch has told what became of the pod.
func (s *settler) seen(uid gpu.PodUID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.open, uid)
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
		if a.state == inFlight && age > s.timeout+settleMargin {
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
	logger := klog.FromContext(ctx).WithValues("pod", klog.KRef(a.pod.Namespace, a.pod.Name), "node", a.node)
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	pod, err := s.api.Pod(ctx, a.pod.Namespace, a.pod.Name)
	outcome := ""
	switch {
	case apierrors.IsNotFound(err), err == nil && gpu.PodUID(pod.UID) != a.pod.UID:
		outcome = OutcomeGone
	case err != nil:
		logger.V(2).Info("An open bind can't be looked up", "err", err)
		return false
	case pod.Spec.NodeName != "":
		outcome = OutcomeBound
	case s.clock.Since(a.at) > s.timeout+settleMargin:
		outcome = OutcomeNotBound
	default:
		return true // Not yet, which doesn't mean never: the write may still be on its way.
	}
	if !s.close(a) {
		return true // A newer attempt began, or the watch was quicker.
	}
	switch outcome {
	case OutcomeBound:
		hold(s.ledger, pod)
	case OutcomeGone:
		s.ledger.Drop(a.pod.UID)
	case OutcomeNotBound:
		s.ledger.Release(a.pod.UID)
	}
	logger.Info("An open bind is settled", "outcome", outcome)
	s.observer.Settled(outcome)
	return true
}

// close removes the attempt if it is still the one that was looked up.
func (s *settler) close(a attempt) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[a.pod.UID] != a {
		return false
	}
	delete(s.open, a.pod.UID)
	return true
}

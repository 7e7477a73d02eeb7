package cluster

import (
	"context"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
)

// gathered is a batch with a fake clock.
type gathered struct {
	batch
	t     *testing.T
	clock *clocktesting.FakeClock
}

func newGathered(t *testing.T, window time.Duration) *gathered {
	c := clocktesting.NewFakeClock(begin)
	return &gathered{batch: batch{clock: c, window: window}, t: t, clock: c}
}

// wantGone checks whether the binds that wait for these channels were sent.
func (g *gathered) wantGone(want bool, all ...<-chan struct{}) {
	g.t.Helper()
	for i, next := range all {
		if want {
			<-next
			continue
		}
		select {
		case <-next:
			g.t.Errorf("number %d didn't wait", i)
		default:
		}
		if !g.clock.HasWaiters() { // The timer has fired, and the binds are sent at any moment.
			g.t.Errorf("number %d waits no longer", i)
		}
	}
}

func (g *gathered) wantAtOnce() {
	g.t.Helper()
	if g.join() != nil {
		g.t.Error("it was to go at once")
	}
}

func TestBindsOfAStormGoTogether(t *testing.T) {
	g := newGathered(t, 50*time.Millisecond)
	g.wantAtOnce()
	g.clock.Step(windowPerBind / 2)
	first, second := g.join(), g.join()
	g.wantGone(false, first, second)
	g.clock.Step(windowPerBind / 2)
	g.wantGone(true, first, second)

	// After two binds the wait is twice as long.
	third, fourth, fifth := g.join(), g.join(), g.join()
	g.clock.Step(2*windowPerBind - time.Millisecond)
	g.wantGone(false, third, fourth, fifth)
	g.clock.Step(time.Millisecond)
	g.wantGone(true, third, fourth, fifth)

	// The wait is never longer than the window.
	sixth := g.join()
	g.clock.Step(49 * time.Millisecond)
	g.wantGone(false, sixth)
	g.clock.Step(time.Millisecond)
	g.wantGone(true, sixth)

	g.clock.Step(windowPerBind)
	g.wantAtOnce()
}

func TestBindsThatComeOneByOneDoNotWait(t *testing.T) {
	g := newGathered(t, time.Second)
	for range 3 {
		g.wantAtOnce()
		g.clock.Step(windowPerBind)
	}
	each := newGathered(t, 0)
	for range 3 {
		each.wantAtOnce()
	}
}

func TestNobodyWaitsLongerThanAWindowWhateverTheClockDoes(t *testing.T) {
	g := newGathered(t, windowPerBind)
	g.wantAtOnce()
	g.clock.SetTime(begin.Add(-time.Hour))
	next := g.join()
	g.clock.Step(windowPerBind)
	g.wantGone(true, next)
}

func TestABindWaitsNoLongerThanItMay(t *testing.T) {
	g := newGathered(t, windowPerBind)
	g.wantAtOnce()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	g.wait(ctx) // If wait ignored ctx, it would block forever.
	g.clock.Step(windowPerBind)
}

// waitingBind is a Cluster with one bound pod and another pod whose bind waits.
type waitingBind struct {
	*fixture
	leads leadership
	pod   *corev1.Pod
	ended chan error
}

func startWaiting(t *testing.T, timeout time.Duration) *waitingBind {
	t.Helper()
	a, w := newPod("a", 4), &waitingBind{pod: newPod("b", 4), ended: make(chan error, 1)}
	w.fixture = startWith(t, Options{BindTimeout: timeout, BindWindow: windowPerBind, Leading: w.leads.ask},
		func(*Cluster) {}, newNode(t, "n1", 16), a, w.pod)
	if err := w.TakeOver(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := w.bind(a); err != nil {
		t.Fatal(err)
	}
	go func() { w.ended <- w.bind(w.pod) }()
	w.await("it to wait", func() bool {
		w.batch.mu.Lock()
		defer w.batch.mu.Unlock()
		return w.batch.next != nil
	})
	return w
}

func (w *waitingBind) wantWritten(want int) {
	w.t.Helper()
	if n := w.counts.of("write binding"); n != want {
		w.t.Errorf("%d Bindings were written, want %d", n, want)
	}
}

func TestAStormOfBindsIsGathered(t *testing.T) {
	w := startWaiting(t, patient)
	w.wantHeld(w.pod, "assumed n1 card 0") // The card is assumed while the bind waits.
	w.wantWritten(1)
	w.clock.Step(windowPerBind)
	if err := <-w.ended; err != nil {
		t.Error(err)
	}
	w.wantHeld(w.pod, "bound n1 card 0")
}

func TestWhoLeadsNoLongerWhenItsTurnComesWritesNothing(t *testing.T) {
	w := startWaiting(t, patient)
	errStandby := errors.New("standing by")
	w.leads.set(errStandby)
	w.clock.Step(windowPerBind)
	if err := <-w.ended; !errors.Is(err, errStandby) {
		t.Errorf("bind: %v, want %v", err, errStandby)
	}
	w.wantHeld(w.pod, "not held")
	w.wantWritten(1)
}

func TestABindWhoseTimeIsOverWhileItWaitsWasNeverWritten(t *testing.T) {
	w := startWaiting(t, 2*time.Second) // Real time, long enough for the steps before.
	if err := <-w.ended; err == nil || errors.Is(err, ErrUnsettled) {
		t.Errorf("bind: %v, want that nothing was written", err)
	}
	w.wantHeld(w.pod, "not held")
	w.wantWritten(1)
}

func TestAPodThatGoesWhileItsBindWaitsHoldsNothing(t *testing.T) {
	w := startWaiting(t, patient)
	w.server.with(func(s *server) { delete(s.pods, types.NamespacedName{Namespace: w.pod.Namespace, Name: w.pod.Name}) })
	w.publishGone(w.pod)
	w.awaitHeld(w.pod, "not held")
	w.clock.Step(windowPerBind)
	if err := <-w.ended; err == nil {
		t.Error("what is gone was bound")
	}
	w.wantHeld(w.pod, "not held")
}

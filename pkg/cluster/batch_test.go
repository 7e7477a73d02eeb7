package cluster

import (
	"context"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
)

// gathered is a batch by a clock of the test's.
type gathered struct {
	batch
	t     *testing.T
	clock *clocktesting.FakeClock
}

func newGathered(t *testing.T, window time.Duration) *gathered {
	c := clocktesting.NewFakeClock(begin)
	return &gathered{batch: batch{clock: c, window: window}, t: t, clock: c}
}

// wantGone checks whether those wait that hold these.
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

	// After two the wait is twice as long.
	third, fourth, fifth := g.join(), g.join(), g.join()
	g.clock.Step(2*windowPerBind - time.Millisecond)
	g.wantGone(false, third, fourth, fifth)
	g.clock.Step(time.Millisecond)
	g.wantGone(true, third, fourth, fifth)

	// And never longer than the window.
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
	g.wait(ctx) // Or it waits for ever.
	g.clock.Step(windowPerBind)
}

// One that waits for its turn holds its card meanwhile.
func TestAStormOfBindsIsGathered(t *testing.T) {
	a, b := newPod("a", 4), newPod("b", 4)
	f := startWith(t, Options{BindTimeout: patient, BindWindow: windowPerBind}, func(*Cluster) {}, newNode(t, "n1", 16), a, b)
	if err := f.bind(a); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- f.bind(b) }()
	f.awaitHeld(b, "reserved n1 card 0") // Its card is its own while it waits.
	f.await("it to wait", func() bool {
		f.batch.mu.Lock()
		defer f.batch.mu.Unlock()
		return f.batch.next != nil
	})
	if n := f.counts.of("write binding"); n != 1 {
		t.Errorf("%d Bindings were written, want 1", n)
	}
	f.clock.Step(windowPerBind)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	f.wantHeld(b, "bound n1 card 0")
}

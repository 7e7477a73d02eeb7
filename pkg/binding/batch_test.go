package binding

import (
	"context"
	"errors"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// batchFixture is a batch with a fake clock.
type batchFixture struct {
	batch
	t     *testing.T
	clock *clocktesting.FakeClock
}

func newBatch(t *testing.T, window time.Duration) *batchFixture {
	c := clocktesting.NewFakeClock(begin)
	return &batchFixture{batch: batch{clock: c, window: window}, t: t, clock: c}
}

// queued is a time as a pending pod that allows every wait.
const queued = time.Minute

// bind adds a bind of a pod that was pending for this time, and checks how long it waits.
func (g *batchFixture) bind(pending, want time.Duration) {
	g.t.Helper()
	if wait := g.join(pending); wait != want {
		g.t.Errorf("the bind waits %v, want %v", wait, want)
	}
}

func TestBatch(t *testing.T) {
	const half = windowPerBind / 2
	g := newBatch(t, 50*time.Millisecond)
	g.bind(queued, 0)
	g.clock.Step(half)
	g.bind(queued, half)
	g.bind(queued, half)
	g.clock.Step(half)

	// After two binds the wait is twice as long, and these three are sent together.
	g.bind(queued, 2*windowPerBind)
	g.clock.Step(half)
	g.bind(queued, 3*half)
	g.bind(queued, 3*half)
	g.clock.Step(3 * half)

	// The wait is never longer than the window.
	g.bind(queued, 50*time.Millisecond)
	g.clock.Step(50*time.Millisecond + windowPerBind)
	g.bind(queued, 0)
}

func TestBatchFewBinds(t *testing.T) {
	g := newBatch(t, time.Second)
	for range 3 {
		g.bind(queued, 0)
		g.clock.Step(windowPerBind)
	}
	each := newBatch(t, 0)
	for range 3 {
		each.bind(queued, 0)
	}
}

// The wait is short beside the time for which the pod has been pending.
func TestBatchPatience(t *testing.T) {
	g := newBatch(t, time.Second)
	for range 3 { // Pods that are tried when they are created.
		g.bind(5*time.Millisecond, 0)
	}
	const enough = pendingPerWait * windowPerBind
	g.bind(enough-pendingPerWait, 0)
	g.bind(enough, windowPerBind)
	g.bind(0, 0) // A new pod beside it.
	g.clock.Step(windowPerBind / 2)
	g.bind(enough, windowPerBind/2)
}

func TestBatchClockSetBack(t *testing.T) {
	g := newBatch(t, windowPerBind)
	g.bind(queued, 0)
	g.clock.SetTime(begin.Add(-time.Hour))
	g.bind(queued, windowPerBind)
	g.clock.Step(windowPerBind / 2)
	g.bind(queued, windowPerBind/2)
}

func TestBatchContext(t *testing.T) {
	g := newBatch(t, windowPerBind)
	g.bind(queued, 0)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if !g.wait(ctx, queued) { // If wait ignored ctx, it would block forever.
		t.Error("the bind didn't wait")
	}
}

// A bind that waits in a batch has its card assumed. What ends its wait decides whether it is written.
func TestWriteInBatch(t *testing.T) {
	for name, test := range map[string]struct {
		// end ends the wait.
		end        func(f *fixture, cancel func())
		wantResult reasons.Result
		want       string
		wantWrites int
	}{
		"the window is over":      {func(*fixture, func()) {}, reasons.ResultBound, "bound n1 card 0", 2},
		"the bind's time is over": {func(_ *fixture, cancel func()) { cancel() }, reasons.ResultUnreachable, "none", 1},
		"the term is over":        {func(f *fixture, _ func()) { f.standby = errors.New("standby") }, reasons.ResultNotLeading, "none", 1},
		"the pod is deleted": {func(f *fixture, _ func()) {
			f.server.Remove(fake.Pod("b", 4))
			f.PodGone("uid-b")
			f.want(fake.Pod("b", 4), "none")
		}, reasons.ResultRejected, "none", 2},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := fake.Pod("a", 4), fake.Pod("b", 4)
			f := newFixture(t, windowPerBind, a, b)
			if _, err := f.bind(a, "n1"); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan reasons.Result)
			go func() {
				result, _ := f.bindUntil(ctx, b, "n1")
				ended <- result
			}()
			await.True(t, "the bind waits", f.clock.HasWaiters)
			f.want(b, "assumed n1 card 0")
			test.end(f, cancel)
			if test.wantResult != reasons.ResultUnreachable {
				f.clock.Step(windowPerBind)
			}
			if result := <-ended; result != test.wantResult {
				t.Errorf("%s, want %s", result, test.wantResult)
			}
			f.want(b, test.want)
			if n := f.observer.Count("write binding"); n != test.wantWrites {
				t.Errorf("%d Bindings were written, want %d", n, test.wantWrites)
			}
		})
	}
}

// TestWriteMembership writes the bind of a member that asks for no GPU memory.
func TestWriteMembership(t *testing.T) {
	pod := fake.Pod("p", 0)
	f := newFixture(t, 0, pod)
	member := Membership{Run: "uid-a", Whole: true}
	claim := f.claim(pod)
	defer claim.End()
	if _, err := claim.Write(t.Context(), "n1", ledger.Allocation{Pod: protocol.Pod(pod)}, nil, member); err != nil {
		t.Error(err)
	}
	want := map[string]string{protocol.AnnotationGroupRun: "uid-a", protocol.AnnotationGroupWhole: "true"}
	check.Equal(t, "annotations", want, f.server.Get(pod).Annotations)
}

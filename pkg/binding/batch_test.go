package binding

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/apiserver/fake"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
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

// wantSent checks whether the binds that wait for these channels were sent.
func (g *batchFixture) wantSent(want bool, all ...<-chan struct{}) {
	g.t.Helper()
	for i, next := range all {
		if want {
			<-next
			continue
		}
		select {
		case <-next:
			g.t.Errorf("bind %d didn't wait", i)
		default:
		}
		if !g.clock.HasWaiters() { // The timer has fired, and the binds are sent at any moment.
			g.t.Errorf("bind %d waits no longer", i)
		}
	}
}

// queued is a time as a pending pod that allows every wait.
const queued = time.Minute

// bind adds the bind of a pod that was pending for long.
func (g *batchFixture) bind() <-chan struct{} { return g.join(queued) }

func (g *batchFixture) wantAtOnce() {
	g.t.Helper()
	if g.bind() != nil {
		g.t.Error("the bind waits, want that it is sent at once")
	}
}

func TestBatch(t *testing.T) {
	g := newBatch(t, 50*time.Millisecond)
	g.wantAtOnce()
	g.clock.Step(windowPerBind / 2)
	first, second := g.bind(), g.bind()
	g.wantSent(false, first, second)
	g.clock.Step(windowPerBind / 2)
	g.wantSent(true, first, second)

	// After two binds the wait is twice as long.
	third, fourth, fifth := g.bind(), g.bind(), g.bind()
	g.clock.Step(2*windowPerBind - time.Millisecond)
	g.wantSent(false, third, fourth, fifth)
	g.clock.Step(time.Millisecond)
	g.wantSent(true, third, fourth, fifth)

	// The wait is never longer than the window.
	sixth := g.bind()
	g.clock.Step(49 * time.Millisecond)
	g.wantSent(false, sixth)
	g.clock.Step(time.Millisecond)
	g.wantSent(true, sixth)

	g.clock.Step(windowPerBind)
	g.wantAtOnce()
}

func TestBatchFewBinds(t *testing.T) {
	g := newBatch(t, time.Second)
	for range 3 {
		g.wantAtOnce()
		g.clock.Step(windowPerBind)
	}
	each := newBatch(t, 0)
	for range 3 {
		each.wantAtOnce()
	}
}

// The wait is short beside the time for which the pod has been pending.
func TestBatchPatience(t *testing.T) {
	g := newBatch(t, time.Second)
	for range 3 { // Pods that are tried when they are created.
		if g.join(5*time.Millisecond) != nil {
			t.Error("the bind waits, want that it is sent at once")
		}
	}
	const enough = pendingPerWait * windowPerBind
	if g.join(enough-pendingPerWait) != nil {
		t.Error("the bind waits longer than its pod allows")
	}
	next := g.join(enough)
	g.wantSent(false, next)
	if g.join(0) != nil {
		t.Error("the bind of a new pod waits beside others")
	}
	g.clock.Step(windowPerBind)
	g.wantSent(true, next)
}

func TestBatchClockSetBack(t *testing.T) {
	g := newBatch(t, windowPerBind)
	g.wantAtOnce()
	g.clock.SetTime(begin.Add(-time.Hour))
	next := g.bind()
	g.clock.Step(windowPerBind)
	g.wantSent(true, next)
}

func TestBatchContext(t *testing.T) {
	g := newBatch(t, windowPerBind)
	g.wantAtOnce()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if !g.wait(ctx, queued) { // If wait ignored ctx, it would block forever.
		t.Error("the bind didn't wait")
	}
	g.clock.Step(windowPerBind)
}

// A bind that waits in a batch has its card assumed. What ends its wait decides whether it is written.
func TestWriteInBatch(t *testing.T) {
	for name, test := range map[string]struct {
		// end ends the wait.
		end        func(f *fixture, cancel func())
		wantResult Result
		want       string
		wantWrites int
	}{
		"the window is over":      {func(*fixture, func()) {}, Bound, "bound n1 card 0", 2},
		"the bind's time is over": {func(_ *fixture, cancel func()) { cancel() }, Unreachable, "none", 1},
		"the term is over":        {func(f *fixture, _ func()) { f.standby = errors.New("standby") }, NotLeading, "none", 1},
		"the pod is deleted": {func(f *fixture, _ func()) {
			f.server.Remove(fake.Pod("b", 4))
			f.PodGone("uid-b")
			f.want(fake.Pod("b", 4), "none")
		}, Rejected, "none", 2},
	} {
		t.Run(name, func(t *testing.T) {
			a, b := fake.Pod("a", 4), fake.Pod("b", 4)
			f := newFixture(t, windowPerBind, a, b)
			if _, err := f.bind(a, "n1"); err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan Result)
			go func() {
				result, _ := f.bindUntil(ctx, b, "n1")
				ended <- result
			}()
			await.True(t, "the bind waits", f.clock.HasWaiters)
			f.want(b, "assumed n1 card 0")
			test.end(f, cancel)
			if test.wantResult != Unreachable {
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
	if diff := cmp.Diff(want, f.server.Get(pod).Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
}

package binding

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	os.Exit(m.Run())
}

var begin = time.Date(2026, 7, 1, 12, 0, 0, 0, time.UTC)

const timeout = 30 * time.Second // No test reaches it.

var (
	errLost      = fmt.Errorf("reading the answer: %w", io.ErrUnexpectedEOF)
	errForbidden = apierrors.NewForbidden(fake.PodResource, "p", errors.New("no permission"))
	errServer    = apierrors.NewInternalError(errors.New("etcdserver: request timed out"))
	errConflict  = apierrors.NewConflict(fake.PodResource, "p", errors.New("changed"))
)

// fixture is a Binder that doesn't run: the test moves the clock, reports pods as the watch does, and resolves binds.
type fixture struct {
	*Binder
	t        *testing.T
	clock    *clocktesting.FakeClock
	server   *fake.Server
	observer *fake.Observer
	ledger   *ledger.Ledger
	events   chan string
	// standby is why this process must not write; nil if it may.
	standby error
	// heard is what the Binder's listeners received.
	heard []string
	// due are the writes to read.
	due []*write
}

// newFixture returns a Binder for the nodes n1 and n2 with two cards of 100 each, and an API server that has the pods.
func newFixture(t *testing.T, window time.Duration, pods ...*corev1.Pod) *fixture {
	recorder := record.NewFakeRecorder(1000)
	f := &fixture{
		t: t, clock: clocktesting.NewFakeClock(begin), server: fake.NewServer(pods...), observer: &fake.Observer{}, events: recorder.Events,
		ledger: fake.Ledger(fake.Node("n1", 100, 100), fake.Node("n2", 100, 100)),
	}
	f.Binder = New(Options{
		API: f.server, Ledger: f.ledger, Recorder: recorder, Observer: f.observer, Clock: f.clock, Timeout: timeout, Window: window,
		Leading: func() error { return f.standby },
	})
	f.AddListener(f)
	return f
}

// PodRead implements Listener.
func (f *fixture) PodRead(pod *clustercache.PodInfo) {
	f.heard = append(f.heard, fmt.Sprintf("%s is on %q", pod.Name, pod.Node))
}

// PodReadGone implements Listener.
func (f *fixture) PodReadGone(uid gpu.PodUID) {
	f.heard = append(f.heard, fmt.Sprintf("%s is gone", uid))
}

// NotBound implements Listener.
func (f *fixture) NotBound(uid gpu.PodUID) {
	f.heard = append(f.heard, fmt.Sprintf("%s is not bound", uid))
}

// wantHeard compares what the listeners received since the last call.
func (f *fixture) wantHeard(want ...string) {
	f.t.Helper()
	if strings.Join(f.heard, "\n") != strings.Join(want, "\n") {
		f.t.Errorf("the listeners received %q, want %q", f.heard, want)
	}
	f.heard = nil
}

// wantNotBound checks how often the listeners received NotBound.
func (f *fixture) wantNotBound(want int) {
	f.t.Helper()
	if got := strings.Count(strings.Join(f.heard, ""), "is not bound"); got != want {
		f.t.Errorf("%q: the listeners received NotBound %d times, want %d", f.heard, got, want)
	}
}

// claim claims the pod for a bind.
func (f *fixture) claim(pod *corev1.Pod) *Claim {
	f.t.Helper()
	claim, ok := f.Claim(gpu.PodUID(pod.UID))
	if !ok {
		f.t.Fatalf("a bind of %s is in flight", pod.Name)
	}
	return claim
}

// reserve assumes a card for the pod.
func (f *fixture) reserve(pod *corev1.Pod, node string) ledger.Allocation {
	f.t.Helper()
	allocation, err := f.ledger.Reserve(node, protocol.Pod(pod), placement.Binpack, f.clock.Now())
	check.Must(f.t, err)
	return allocation
}

// bind makes the steps of package scheduling: it claims the pod, confirms the node, assumes a card, waits for other binds, and writes the Binding.
func (f *fixture) bind(pod *corev1.Pod, node string) (reasons.Result, error) {
	return f.bindUntil(f.t.Context(), pod, node)
}

func (f *fixture) bindUntil(ctx context.Context, pod *corev1.Pod, node string) (reasons.Result, error) {
	claim, ok := f.Claim(gpu.PodUID(pod.UID))
	if !ok {
		return reasons.ResultInFlight, ErrInFlight
	}
	defer claim.End()
	if err := f.ConfirmNode(ctx, node); err != nil {
		return reasons.ResultUnreachable, err
	}
	allocation, err := f.ledger.Reserve(node, protocol.Pod(pod), placement.Binpack, f.clock.Now())
	if err != nil {
		return reasons.ResultNoRoom, err
	}
	f.Gather(ctx, queued)
	return claim.Write(ctx, node, allocation, nil, Membership{})
}

// commit makes the write of a Binding.
func (f *fixture) commit(binding *corev1.Binding) {
	f.t.Helper()
	if err := f.server.Commit(binding); err != nil {
		f.t.Errorf("commit: %v", err)
	}
}

// answerBinds sets the answers to Bindings.
func (f *fixture) answerBinds(err error) {
	f.server.Answer(fake.Answers{Bind: func(context.Context, *corev1.Binding) error { return err }})
}

// loseAnswers makes all answers get lost. If commits is true, the writes are made.
func (f *fixture) loseAnswers(commits bool) {
	f.server.Answer(fake.Answers{Read: errLost, Bind: func(_ context.Context, b *corev1.Binding) error {
		if commits {
			f.commit(b)
		}
		return errLost
	}})
}

// report reports the API server's state of the pod, as the watch does.
func (f *fixture) report(pod *corev1.Pod) {
	f.PodBound(clustercache.NewPodInfo(f.server.Get(pod)))
}

// resolve lets time pass and reads the pods of the binds that are due.
func (f *fixture) resolve(after time.Duration) {
	f.clock.Step(after)
	f.Resolve(f.t.Context())
}

func (f *fixture) isOpen(pod *corev1.Pod) bool {
	return f.tracker.isOpen(gpu.PodUID(pod.UID))
}

// want compares the pod's allocation, such as "bound n1 card 0", "assumed n1 card 0" or "none".
func (f *fixture) want(pod *corev1.Pod, want string) {
	f.t.Helper()
	got := "none"
	if node, allocation, ok := f.ledger.Lookup(gpu.PodUID(pod.UID)); ok {
		state := map[ledger.State]string{ledger.Assumed: "assumed", ledger.Bound: "bound"}[allocation.State]
		got = fmt.Sprint(state, " ", node, " ", allocation.Placement)
	}
	if got != want {
		f.t.Errorf("the allocation of %s is %q, want %q", pod.Name, got, want)
	}
}

// wantEvents compares the Events since the last call.
func (f *fixture) wantEvents(want ...string) {
	f.t.Helper()
	var got []string
	for len(f.events) > 0 {
		got = append(got, <-f.events)
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		f.t.Errorf("Events %q, want %q", got, want)
	}
}

// assumedEvent returns the Event for a pod that asks for 10 on a card of n1.
func assumedEvent(allocation string) string {
	return fmt.Sprintf("Normal GPUCardAssumed Assumed GPU %s of node n1: 10 MiB of its 100 MiB", strings.TrimPrefix(allocation, "bound n1 "))
}

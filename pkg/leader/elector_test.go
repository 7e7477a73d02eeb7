package leader

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

// changes is an Observer.
type changes chan bool

func (c changes) LeadershipChanged(leads bool) { c <- leads }

// awaitLeading returns when LeadershipChanged was called with true.
func (c changes) awaitLeading(t *testing.T) {
	t.Helper()
	for leads := false; !leads; {
		leads = await.Receive(t, "to lead", c)
	}
}

// replica is a running Elector.
type replica struct {
	*Elector
	changes changes
	// stop stops it and waits until it has ended.
	stop func()
}

// funcs is a Replica of functions that may be nil.
type funcs struct{ takeOver, drain func(context.Context) error }

func (f funcs) TakeOver(ctx context.Context) error { return call(ctx, f.takeOver) }
func (f funcs) Drain(ctx context.Context) error    { return call(ctx, f.drain) }

func call(ctx context.Context, f func(context.Context) error) error {
	if f == nil {
		return nil
	}
	return f(ctx)
}

// run starts an Elector and stops it when the test ends.
func run(t *testing.T, o Options) *replica {
	t.Helper()
	return runWith(t, o, funcs{})
}

func runWith(t *testing.T, o Options, led funcs) *replica {
	t.Helper()
	r := &replica{changes: make(changes, 1000)}
	o.Observer, o.Namespace = r.changes, metav1.NamespaceSystem
	if o.Clock == nil {
		o.Clock = clock.RealClock{}
	}
	var err error
	if r.Elector, err = New(o); err != nil {
		t.Fatal(err)
	}
	logger, _ := ktesting.NewTestContext(t)
	r.stop = await.Run(t, func(ctx context.Context) error { return r.Run(klog.NewContext(ctx, logger), led) })
	return r
}

// quick returns options for a test with one replica and a fake clock. Only that clock determines how long a renewal is
// valid.
func quick(client kubernetes.Interface, clock clock.Clock) Options {
	return Options{
		Client: client, Identity: "us", Clock: clock,
		LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 20 * time.Millisecond,
		BindDeadline: 13 * time.Second,
	}
}

func lease(t *testing.T, client kubernetes.Interface) *resourcelock.LeaderElectionRecord {
	t.Helper()
	l, err := client.CoordinationV1().Leases(metav1.NamespaceSystem).Get(context.Background(), LeaseName, metav1.GetOptions{})
	must(t, err)
	return resourcelock.LeaseSpecToLeaderElectionRecord(&l.Spec)
}

// A stopping leader rejects new requests, drains, and then releases the Lease.
func TestStop(t *testing.T) {
	client := fake.NewClientset()
	o := quick(client, nil)
	o.Clock = clock.RealClock{}
	draining, drained := make(chan struct{}), make(chan struct{})
	drain := func(ctx context.Context) error {
		close(draining)
		select {
		case <-drained:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	r := runWith(t, o, funcs{drain: drain})
	r.changes.awaitLeading(t)
	if err := r.CheckAnswering(); err != nil {
		t.Errorf("CheckAnswering of the leader: %v", err)
	}

	gone := make(chan struct{})
	go func() { defer close(gone); r.stop() }()
	<-draining
	if err := r.CheckAnswering(); !errors.Is(err, ErrStopping) || !errors.Is(err, ErrNotLeading) {
		t.Errorf("CheckAnswering while draining: %v", err)
	}
	before := lease(t, client)
	await.True(t, "the Lease is renewed while draining", func() bool {
		return lease(t, client).RenewTime.After(before.RenewTime.Time)
	})
	if err := r.Leading(); err != nil {
		t.Errorf("Leading while draining: %v", err)
	}
	close(drained)
	<-gone
	if got := lease(t, client).HolderIdentity; got != "" {
		t.Errorf("the Lease is held by %q", got)
	}
	if err := r.Leading(); !errors.Is(err, ErrNotLeading) {
		t.Errorf("after the release: %v", err)
	}
}

// The Lease isn't released if draining fails, because a write can still take effect.
func TestNoReleaseAfterFailedDrain(t *testing.T) {
	client := fake.NewClientset()
	o := quick(client, clock.RealClock{})
	r := runWith(t, o, funcs{drain: func(context.Context) error { return errors.New("the answer of a bind was lost") }})
	r.changes.awaitLeading(t)
	r.stop()
	if got := lease(t, client).HolderIdentity; got != "us" {
		t.Errorf("the Lease is held by %q", got)
	}
}

// silentHolder returns a Lease whose holder doesn't renew it any more.
func silentHolder() *coordinationv1.Lease {
	record := by("them", 0)
	record.LeaseDurationSeconds = 1 // Client-go's elector uses the real clock.
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceSystem, Name: LeaseName},
		Spec:       resourcelock.LeaderElectionRecordToLeaseSpec(record),
	}
}

func renewed(t *term) time.Time {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.renewed
}

func TestTakeOverFromSilentLeader(t *testing.T) {
	client := fake.NewClientset(theService(), silentHolder())
	fakeClock := clocktesting.NewFakeClock(at(0))
	o := quick(client, fakeClock)
	attempts := make(chan struct{}, 1000)
	fail := make(chan error, 1)
	fail <- errors.New("the API server was away")
	takeOver := func(context.Context) error {
		attempts <- struct{}{}
		select {
		case err := <-fail:
			return err
		default:
			return nil
		}
	}
	e := endpoint("10.0.0.7")
	o.Endpoint = &e
	r := runWith(t, o, funcs{takeOver: takeOver})
	await.True(t, "the Lease is taken", func() bool { return errors.Is(r.CheckAnswering(), ErrWaiting) })
	await.True(t, "the new leader is published", func() bool { return strings.Contains(recorded(client), "create") })

	// 1 s of lease and 13 s for binds, in steps within which the Lease is renewed.
	for range 2 {
		fakeClock.Step(6900 * time.Millisecond)
		await.True(t, "the Lease is renewed", func() bool { return renewed(r.term).Equal(fakeClock.Now()) })
	}
	if err := r.CheckAnswering(); !errors.Is(err, ErrWaiting) {
		t.Fatalf("after 13.8 of 14 s: %v", err)
	}
	if len(attempts) != 0 {
		t.Error("it took over before the former leader's writes had ended")
	}
	fakeClock.Step(200 * time.Millisecond)
	r.changes.awaitLeading(t)
	check.NoError(t, r.CheckAnswering())
	if got := len(attempts); got != 2 {
		t.Errorf("%d attempts to take over, want one failure and one success", got)
	}
}

// A new leader that still waits for the former leader's writes doesn't release the Lease.
func TestNoReleaseWhileWaiting(t *testing.T) {
	client := fake.NewClientset(silentHolder())
	r := run(t, quick(client, clocktesting.NewFakeClock(at(0))))
	await.True(t, "the Lease is taken", func() bool { return errors.Is(r.CheckAnswering(), ErrWaiting) })
	r.stop()
	if got := lease(t, client).HolderIdentity; got != "us" {
		t.Errorf("the Lease is held by %q: the next leader wouldn't wait for the writes of the first", got)
	}
}

// A frozen leader is rejected at its first call, before any of its goroutines runs.
func TestFrozenLeader(t *testing.T) {
	fakeClock := clocktesting.NewFakeClock(at(0))
	r, err := New(Options{
		Client: fake.NewClientset(), Identity: "us", Namespace: metav1.NamespaceSystem, Clock: fakeClock, Observer: make(changes, 10),
		LeaseDuration: DefaultLeaseDuration, RenewDeadline: DefaultRenewDeadline, RetryPeriod: DefaultRetryPeriod, BindDeadline: time.Second,
	})
	must(t, err)
	must(t, r.lock.Create(t.Context(), *by("us", 0)))
	r.term.finished(1)
	must(t, r.CheckAnswering())
	fakeClock.Step(DefaultRenewDeadline)
	if err := r.CheckAnswering(); !errors.Is(err, ErrLapsed) {
		t.Errorf("CheckAnswering: %v", err)
	}
	if err := r.Leading(); !errors.Is(err, ErrLapsed) {
		t.Errorf("Leading: %v", err)
	}
}

func TestInvalidOptions(t *testing.T) {
	tests := map[string]func(*Options){
		"no namespace":                 func(o *Options) { o.Namespace = "" },
		"no identity":                  func(o *Options) { o.Identity = "" },
		"no bind deadline":             func(o *Options) { o.BindDeadline = 0 },
		"a lease of 1.5 s":             func(o *Options) { o.LeaseDuration = 1500 * time.Millisecond },
		"a lease below the deadline":   func(o *Options) { o.LeaseDuration = 10 * time.Second },
		"a deadline below the retries": func(o *Options) { o.RetryPeriod = 10 * time.Second },
		"a loopback address":           func(o *Options) { e := endpoint("127.0.0.1"); o.Endpoint = &e },
	}
	for name, spoil := range tests {
		t.Run(name, func(t *testing.T) {
			o := Options{
				Client: fake.NewClientset(), Namespace: metav1.NamespaceSystem, Identity: "us", Clock: clock.RealClock{},
				LeaseDuration: DefaultLeaseDuration, RenewDeadline: DefaultRenewDeadline, RetryPeriod: DefaultRetryPeriod,
				BindDeadline: time.Second,
			}
			if _, err := New(o); err != nil {
				t.Fatal(err)
			}
			spoil(&o)
			if _, err := New(o); err == nil {
				t.Error("no error")
			}
		})
	}
}

func TestNewIdentity(t *testing.T) {
	a, err := NewIdentity()
	must(t, err)
	if b, err := NewIdentity(); err != nil || a == b {
		t.Errorf("twice %q, %v", a, err)
	}
}

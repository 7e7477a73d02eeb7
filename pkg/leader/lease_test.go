package leader

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	clocktesting "k8s.io/utils/clock/testing"
)

// fakeLease is a Lease in memory. Its calls take time and can fail.
type fakeLease struct {
	clock  *clocktesting.FakeClock
	record *resourcelock.LeaderElectionRecord
	took   time.Duration
	errs   []error // For the next calls, one each.
	calls  []string
}

func (f *fakeLease) call(name string) error {
	f.calls = append(f.calls, name)
	f.clock.Step(f.took)
	if len(f.errs) == 0 {
		return nil
	}
	err := f.errs[0]
	f.errs = f.errs[1:]
	return err
}

func (f *fakeLease) Get(context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	if err := f.call("get"); err != nil {
		return nil, nil, err
	}
	if f.record == nil {
		return nil, nil, apierrors.NewNotFound(coordinationv1.Resource("leases"), LeaseName)
	}
	copied := *f.record
	return &copied, nil, nil
}

func (f *fakeLease) Create(_ context.Context, r resourcelock.LeaderElectionRecord) error {
	return f.set("create", r)
}

func (f *fakeLease) Update(_ context.Context, r resourcelock.LeaderElectionRecord) error {
	return f.set("update", r)
}

func (f *fakeLease) set(name string, r resourcelock.LeaderElectionRecord) error {
	if err := f.call(name); err != nil {
		return err
	}
	f.record = &r
	return nil
}

func (f *fakeLease) RecordEvent(string) {}
func (f *fakeLease) Identity() string   { return "us" }
func (f *fakeLease) Describe() string   { return "kube-system/" + LeaseName }

func newFakeLock() (*lock, *fakeLease) {
	clock := clocktesting.NewFakeClock(at(0))
	fake := &fakeLease{clock: clock}
	u := &term{identity: "us", renewDeadline: 10 * time.Second, bindDeadline: 13 * time.Second}
	return &lock{Interface: fake, term: u, clock: clock, timeout: time.Minute, changed: func() {}}, fake
}

func TestRenewalStart(t *testing.T) {
	l, fake := newFakeLock()
	fake.took = 8 * time.Second
	must(t, l.Create(t.Context(), *by("us", 0)))
	l.term.finished(1)
	if got := l.term.status(at(9.9)).phase; got != leading {
		t.Errorf("9.9 s after the start: %v", got)
	}
	if got := l.term.status(at(10)).phase; got != lapsed {
		t.Errorf("10 s after the start: %v", got)
	}
}

func TestRenewalFailed(t *testing.T) {
	l, fake := newFakeLock()
	fake.errs = []error{nil, errors.New("the answer was lost")}
	must(t, l.Create(t.Context(), *by("us", 0)))
	fake.clock.Step(9 * time.Second)
	if err := l.Update(t.Context(), *by("us", 9)); err == nil {
		t.Fatal("no error")
	}
	if got := l.term.status(at(10)).phase; got != lapsed {
		t.Errorf("10 s after the last renewal that succeeded: %v", got)
	}
}

func TestLeaseReads(t *testing.T) {
	l, fake := newFakeLock()
	must(t, l.Create(t.Context(), *by("us", 0)))
	fake.record = by("them", 1)
	if _, _, err := l.Get(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := l.term.status(at(1)).phase; got != standingBy {
		t.Errorf("after another holder was seen: %v", got)
	}

	must(t, l.Update(t.Context(), *by("us", 2)))
	fake.record = nil
	if _, _, err := l.Get(t.Context()); !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	if got := l.term.status(at(2)).phase; got != standingBy {
		t.Errorf("after the Lease was deleted: %v", got)
	}
}

func TestRelease(t *testing.T) {
	conflict := apierrors.NewConflict(coordinationv1.Resource("leases"), LeaseName, errors.New("changed"))
	tests := map[string]struct {
		record     *resourcelock.LeaderElectionRecord
		errs       []error
		wantCalls  []string
		wantHolder string
		wantErr    bool
		// wantHolding is true if the replica still counts as the holder.
		wantHolding bool
	}{
		"our Lease is released":                {by("us", 1), nil, []string{"get", "update"}, "", false, false},
		"another holder's Lease isn't changed": {by("them", 1), nil, []string{"get"}, "them", false, false},
		"a late renewal causes a conflict":     {by("us", 1), []error{nil, conflict}, []string{"get", "update", "get", "update"}, "", false, false},
		"the API server is unreachable":        {by("us", 1), []error{errors.New("no route")}, []string{"get"}, "us", true, true},
		"the update fails":                     {by("us", 1), []error{nil, errors.New("cut")}, []string{"get", "update"}, "us", true, false},
		"a released Lease isn't changed":       {by("", 1), nil, []string{"get"}, "", false, false},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			l, fake := newFakeLock()
			fake.record, fake.errs = test.record, test.errs
			l.term.held(at(0))
			if err := l.release(t.Context()); (err != nil) != test.wantErr {
				t.Errorf("error %v", err)
			}
			if !slices.Equal(fake.calls, test.wantCalls) {
				t.Errorf("calls %v, want %v", fake.calls, test.wantCalls)
			}
			if got := fake.record.HolderIdentity; got != test.wantHolder {
				t.Errorf("holder %q, want %q", got, test.wantHolder)
			}
			if l.term.holding(l.clock.Now()) != test.wantHolding {
				t.Errorf("holding: %v", !test.wantHolding)
			}
		})
	}
}

func TestNudge(t *testing.T) {
	l, fake := newFakeLock()
	round, cancel := l.begin(t.Context())
	defer cancel()
	l.term.held(at(0))
	l.nudge()
	if round.Err() != nil {
		t.Error("the attempt of a holder was interrupted")
	}
	fake.clock.Step(10 * time.Second)
	l.nudge()
	if round.Err() == nil {
		t.Error("the attempt of a lapsed holder wasn't interrupted")
	}
}

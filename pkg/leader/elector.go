package leader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/background"
)

// LeaseName is the name of the Lease that elects the leader.
const LeaseName = "gpushare-extender"

// The defaults of the Kubernetes components.
const (
	DefaultLeaseDuration = 15 * time.Second
	DefaultRenewDeadline = 10 * time.Second
	DefaultRetryPeriod   = 2 * time.Second
)

// Observer records metrics. Its method must not block.
type Observer interface {
	// LeadershipChanged reports whether this replica leads: once at the start, and then after each change.
	LeadershipChanged(leads bool)
}

// Options configure an Elector. All replicas must have the same durations.
type Options struct {
	// Client should have its own rate limit, so that a burst of binds doesn't delay a renewal.
	Client    kubernetes.Interface
	Namespace string
	// Identity is unique to this process, also among former processes of the same pod; see NewIdentity.
	Identity string

	// LeaseDuration, in whole seconds, is how long standbys wait for a silent leader. RenewDeadline, which is shorter, is
	// how long a renewal counts for the leader itself. RetryPeriod is the interval between renewals.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// BindDeadline is how long after Leading has returned nil a write that relied on it can still take effect.
	BindDeadline time.Duration

	// Endpoint is the address that the leader publishes; nil to publish none.
	Endpoint *Endpoint
	Observer Observer
	// Clock is the real clock outside tests. client-go's elector always uses the real one.
	Clock clock.Clock
}

// Replica is what an Elector leads; *scheduling.Scheduler does most of it.
type Replica interface {
	// TakeOver reads what former leaders have written, all of which is visible by then. The replica answers only once it
	// has returned nil; it is retried while the Lease is held.
	TakeOver(ctx context.Context) error
	// Drain waits until no write of this replica can take effect any more. CheckAnswering already returns an error by then, and
	// calls that it admitted before go on. ctx ends after BindDeadline. If Drain fails the Lease is not released, and the
	// next leader waits as after a kill.
	Drain(ctx context.Context) error
}

// NewIdentity returns an Identity from the host name and a random UUID.
func NewIdentity() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("making an identity: %w", err)
	}
	return host + "_" + string(uuid.NewUUID()), nil
}

// Elector takes part in the election and reports whether this replica leads. Its methods are safe for concurrent use.
type Elector struct {
	Options
	term      *term
	lock      *lock
	elector   *leaderelection.LeaderElector
	publisher *publisher // Nil if nothing is published.
	stopping  atomic.Bool

	// changed triggers attend, renewed triggers publish.
	changed, renewed background.Signal
}

// New wires an Elector. Nothing is read before Run.
func New(o Options) (*Elector, error) {
	switch {
	case o.Namespace == "":
		return nil, errors.New("electing a leader: the Lease needs a namespace")
	case o.Identity == "":
		return nil, errors.New("electing a leader: this replica needs an identity")
	case o.BindDeadline <= 0:
		return nil, errors.New("electing a leader: the bind deadline must be positive")
	case o.LeaseDuration%time.Second != 0:
		return nil, fmt.Errorf("electing a leader: the lease duration %s isn't of whole seconds", o.LeaseDuration)
	}
	e := &Elector{
		Options: o,
		term:    &term{identity: o.Identity, renewDeadline: o.RenewDeadline, bindDeadline: o.BindDeadline},
		changed: background.NewSignal(),
		renewed: background.NewSignal(),
	}
	e.lock = &lock{
		Interface: newLease(o.Client, o.Namespace, o.Identity),
		term:      e.term, clock: o.Clock, timeout: o.RenewDeadline / 2,
		changed: func() { e.changed.Raise(); e.renewed.Raise() },
	}
	if o.Endpoint != nil {
		if err := o.Endpoint.validate(); err != nil {
			return nil, err
		}
		e.publisher = newPublisher(o.Client, *o.Endpoint, o.Identity, e.holding)
	}
	var err error
	e.elector, err = leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: e.lock, Name: LeaseName,
		LeaseDuration: o.LeaseDuration, RenewDeadline: o.RenewDeadline, RetryPeriod: o.RetryPeriod,
		// Run releases the Lease. client-go would also release it after a failed renewal, with binds in flight.
		ReleaseOnCancel: false,
		// The lock reports changes earlier and in more detail.
		Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {}},
	})
	if err != nil {
		return nil, fmt.Errorf("electing a leader: %w", err)
	}
	return e, nil
}

// CheckAnswering returns nil if this replica is to answer kube-scheduler, else an error that wraps ErrNotLeading. A caller must
// count a call for Drain before it calls CheckAnswering.
func (e *Elector) CheckAnswering() error {
	if e.stopping.Load() {
		return ErrStopping
	}
	return e.Leading()
}

// Leading returns nil if this replica leads at this moment, else an error that wraps ErrNotLeading. A stopping replica can
// still lead. Callers ask it right before each write that only a leader may make.
func (e *Elector) Leading() error { return e.term.status(e.Clock.Now()).phase.err() }

func (e *Elector) holding() bool { return e.term.holding(e.Clock.Now()) }

// Run takes part in the election until ctx ends, also after a loss. Then it stops answering, drains, and releases the Lease.
func (e *Elector) Run(ctx context.Context, replica Replica) error {
	logger := klog.FromContext(ctx).WithValues("lease", e.lock.Describe(), "identity", e.Identity)
	ctx = klog.NewContext(ctx, logger)
	electing, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()

	failed := make(chan error, 1)
	var parts sync.WaitGroup
	parts.Go(func() {
		if err := e.lock.watch(electing, e.Client, e.Namespace); err != nil {
			failed <- err
		}
	})
	parts.Go(func() { e.elect(electing) })
	parts.Go(func() { e.attend(electing, replica) })
	if e.publisher != nil {
		parts.Go(func() { e.publish(electing) })
	}

	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	e.stopping.Store(true)
	e.changed.Raise()
	drained := e.drain(electing, replica)
	stop()
	parts.Wait()
	e.handOver(context.WithoutCancel(ctx), drained)
	return err
}

// elect runs client-go's elector, which returns each time that it loses the Lease.
func (e *Elector) elect(ctx context.Context) {
	for ctx.Err() == nil {
		round, cancel := e.lock.begin(ctx)
		e.elector.Run(round)
		cancel()
	}
}

func (e *Elector) drain(ctx context.Context, replica Replica) error {
	ctx, cancel := context.WithTimeout(ctx, e.BindDeadline)
	defer cancel()
	return replica.Drain(ctx)
}

// handOver releases the Lease if the next leader may answer at once.
func (e *Elector) handOver(ctx context.Context, drained error) {
	logger := klog.FromContext(ctx)
	switch {
	case e.term.status(e.Clock.Now()).phase == standingBy:
	case drained != nil:
		logger.Error(drained, "Lease not released, because writes may still be in flight")
	case !e.term.mayRelease(e.Clock.Now()):
		logger.Info("Lease not released, because writes of the former leader may still be in flight")
	default:
		if err := e.lock.release(ctx); err != nil {
			logger.Error(err, "Lease not released")
			return
		}
		logger.Info("Lease released")
	}
}

// attend reports each change of phase, and takes over when the phase asks for it.
func (e *Elector) attend(ctx context.Context, replica Replica) {
	logger := klog.FromContext(ctx)
	reported := standingBy
	e.Observer.LeadershipChanged(false)
	defer func() {
		if reported == leading {
			e.Observer.LeadershipChanged(false)
		}
	}()
	for {
		s := e.term.status(e.Clock.Now())
		if s.phase != reported {
			logger.Info("Leadership changed", "now", s.phase, "before", reported)
			if (s.phase == leading) != (reported == leading) {
				e.Observer.LeadershipChanged(s.phase == leading)
			}
			reported = s.phase
		}
		if s.phase == takingOver {
			err := e.takeOver(ctx, replica)
			if err == nil {
				e.term.finished(s.number)
				continue
			}
			logger.Error(err, "Takeover failed, retrying after the next renewal")
		}
		if !e.await(ctx, s.until) {
			return
		}
	}
}

func (e *Elector) takeOver(ctx context.Context, replica Replica) error {
	ctx, cancel := context.WithTimeout(ctx, e.RenewDeadline)
	defer cancel()
	return replica.TakeOver(ctx)
}

// await waits for the next change, or for the given time unless that is zero. It returns false when ctx ends.
func (e *Elector) await(ctx context.Context, until time.Time) bool {
	var due <-chan time.Time
	if !until.IsZero() {
		timer := e.Clock.NewTimer(until.Sub(e.Clock.Now()))
		defer timer.Stop()
		due = timer.C()
	}
	select {
	case <-ctx.Done():
		return false
	case <-e.changed:
	case <-due:
	}
	return true
}

// publish checks the EndpointSlice after each renewal, the first one included.
func (e *Elector) publish(ctx context.Context) {
	logger := klog.FromContext(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.renewed:
		}
		if !e.holding() {
			continue
		}
		attempt, cancel := context.WithTimeout(ctx, e.lock.timeout)
		written, err := e.publisher.publish(attempt)
		cancel()
		switch {
		case err != nil && ctx.Err() == nil:
			logger.Error(err, "EndpointSlice not updated, retrying after the next renewal")
		case written:
			logger.Info("EndpointSlice updated", "service", klog.KRef(e.Endpoint.Namespace, e.Endpoint.Service), "address", e.Endpoint.Address, "port", e.Endpoint.Port)
		}
	}
}

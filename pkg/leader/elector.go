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
)

// LeaseName is the name of the Lease that elects the leader.
const LeaseName = "gpushare-extender"

// The usual times of Kubernetes' own components.
const (
	DefaultLeaseDuration = 15 * time.Second
	DefaultRenewDeadline = 10 * time.Second
	DefaultRetryPeriod   = 2 * time.Second
)

// Observer is told what happens, for metrics. Its method must return at once.
type Observer interface {
	// LeadershipChanged tells whether this replica leads: once at the start, and then at each change.
	LeadershipChanged(leads bool)
}

// Options are what an Elector works with. All replicas must be given the same times.
type Options struct {
	// Client should have a limit of requests of its own, so that a burst of binds doesn't hold up a renewal.
	Client kubernetes.Interface
	// Namespace is where the Lease is.
	Namespace string
	// Identity tells this process from all others, former ones of the same pod too; see NewIdentity.
	Identity string

	// LeaseDuration, of whole seconds, is how long others wait for a leader that is silent. RenewDeadline, which is
	// shorter, is how long a leader counts on a renewal. RetryPeriod is how often it renews.
	LeaseDuration, RenewDeadline, RetryPeriod time.Duration
	// BindDeadline is how long after Leading has returned nil a write that relied on it may still appear.
	BindDeadline time.Duration

	// Drain returns when no write that this replica has begun can appear any more: Answer refuses by then, and what it
	// let in before goes on. Until ctx ends it has BindDeadline's time. After an error the Lease isn't released, and
	// the next leader waits as if this one had been killed. Nil where there is nothing to wait for.
	Drain func(ctx context.Context) error
	// TakeOver brings what this process knows to what former leaders have written, all of which can be read by then;
	// before it has returned nil, nothing is answered. It is tried again while the Lease is held. Nil where there is
	// nothing to read.
	TakeOver func(ctx context.Context) error

	// Endpoint is what the leader publishes; nil for nothing.
	Endpoint *Endpoint
	Observer Observer
	// Clock is real outside tests. Client-go's own elector has the real one in any case.
	Clock clock.Clock
}

// NewIdentity returns an Identity: the host's name, and what sets this process apart.
func NewIdentity() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("making an identity: %w", err)
	}
	return host + "_" + string(uuid.NewUUID()), nil
}

// Elector takes part in the election and says whether this replica leads. Its methods may be called from many
// goroutines.
type Elector struct {
	Options
	term      *term
	lock      *lock
	elector   *leaderelection.LeaderElector
	publisher *publisher // Nil where nothing is published.
	stopping  atomic.Bool

	// changed and renewed wake the goroutines that attend to the phase and to the EndpointSlice.
	changed, renewed signal
}

// signal wakes a goroutine: any number of raises before it looks count as one.
type signal chan struct{}

func (s signal) raise() {
	select {
	case s <- struct{}{}:
	default:
	}
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
		changed: make(signal, 1),
		renewed: make(signal, 1),
	}
	e.lock = &lock{
		Interface: newLease(o.Client, o.Namespace, o.Identity),
		term:      e.term, clock: o.Clock, timeout: o.RenewDeadline / 2,
		changed: func() { e.changed.raise(); e.renewed.raise() },
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
		// Releasing is up to Run. This one would release as well after a renewal that failed, with binds in flight.
		ReleaseOnCancel: false,
		// The lock tells more, and earlier.
		Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: func(context.Context) {}, OnStoppedLeading: func() {}},
	})
	if err != nil {
		return nil, fmt.Errorf("electing a leader: %w", err)
	}
	return e, nil
}

// Answer returns nil if this replica is to answer kube-scheduler, and else why not, an ErrNotLeading. What Drain waits
// for must be counted before Answer is asked.
func (e *Elector) Answer() error {
	if e.stopping.Load() {
		return ErrStopping
	}
	return e.Leading()
}

// Leading returns nil if this replica leads at this moment, and else why not, an ErrNotLeading. While stopping it may
// lead still. To be asked right before each write that only a leader may make.
func (e *Elector) Leading() error { return e.term.status(e.Clock.Now()).phase.err() }

func (e *Elector) holding() bool { return e.term.holding(e.Clock.Now()) }

// Run takes part in the election until ctx ends, and then hands over: answers no more, drains, and gives the Lease up.
// A lost Lease doesn't end it.
func (e *Elector) Run(ctx context.Context) error {
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
	parts.Go(func() { e.attend(electing) })
	if e.publisher != nil {
		parts.Go(func() { e.publish(electing) })
	}

	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	}
	e.stopping.Store(true)
	e.changed.raise()
	drained := e.drain(electing)
	stop()
	parts.Wait()
	e.handOver(context.WithoutCancel(ctx), drained)
	return err
}

// elect has client-go compete for the Lease and renew it, again and again.
func (e *Elector) elect(ctx context.Context) {
	for ctx.Err() == nil {
		round, cancel := e.lock.begin(ctx)
		e.elector.Run(round)
		cancel()
	}
}

func (e *Elector) drain(ctx context.Context) error {
	if e.Drain == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, e.BindDeadline)
	defer cancel()
	return e.Drain(ctx)
}

// handOver gives the Lease up, if the next leader may answer at once.
func (e *Elector) handOver(ctx context.Context, drained error) {
	logger := klog.FromContext(ctx)
	switch {
	case e.term.status(e.Clock.Now()).phase == standingBy:
	case drained != nil:
		logger.Info("The Lease is left to expire, since writes may still be under way", "err", drained)
	case !e.term.mayRelease(e.Clock.Now()):
		logger.Info("The Lease is left to expire, since writes of the former leader may still be under way")
	default:
		if err := e.lock.release(ctx); err != nil {
			logger.Info("The Lease is left to expire", "err", err)
			return
		}
		logger.Info("The Lease is released")
	}
}

// attend tells of each change of phase, and takes over where it is time to.
func (e *Elector) attend(ctx context.Context) {
	logger := klog.FromContext(ctx)
	told := standingBy
	e.Observer.LeadershipChanged(false)
	defer func() {
		if told == leading {
			e.Observer.LeadershipChanged(false)
		}
	}()
	for {
		s := e.term.status(e.Clock.Now())
		if s.phase != told {
			logger.Info("Leadership changed", "now", s.phase, "before", told)
			if (s.phase == leading) != (told == leading) {
				e.Observer.LeadershipChanged(s.phase == leading)
			}
			told = s.phase
		}
		if s.phase == takingOver {
			err := e.takeOver(ctx)
			if err == nil {
				e.term.finished(s.number)
				continue
			}
			logger.Info("Taking over failed, and is tried again", "err", err)
			// Each renewal is an occasion for the next attempt.
		}
		if !e.await(ctx, s.until) {
			return
		}
	}
}

func (e *Elector) takeOver(ctx context.Context) error {
	if e.TakeOver == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, e.RenewDeadline)
	defer cancel()
	return e.TakeOver(ctx)
}

// await returns at the next change, or at that time unless it is zero. It says whether ctx goes on.
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

// publish looks at the EndpointSlice at each renewal, the first included.
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
			logger.Info("This replica could not be published, which is tried again", "err", err)
		case written:
			logger.Info("Published", "service", klog.KRef(e.Endpoint.Namespace, e.Endpoint.Service), "address", e.Endpoint.Address, "port", e.Endpoint.Port)
		}
	}
}

package leader

import (
	"context"
	"fmt"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/clock"
)

// releaseTimeout bounds the release of the Lease, so that a stopping process doesn't wait for an unreachable API server.
const releaseTimeout = 2 * time.Second

// lock is the Lease as client-go's elector uses it. It reports each call's result and start time to the term.
type lock struct {
	resourcelock.Interface
	term  *term
	clock clock.PassiveClock
	// timeout bounds each call, so that after a hanging call there is time for another within the renew deadline.
	timeout time.Duration
	// changed is called after each call that updated the term.
	changed func()

	// calls is held during each call, and guards round, which ends the elector's current attempt.
	calls sync.Mutex
	round context.CancelFunc
}

func newLease(client kubernetes.Interface, namespace, identity string) resourcelock.Interface {
	return &resourcelock.LeaseLock{
		LeaseMeta:  metav1.ObjectMeta{Namespace: namespace, Name: LeaseName},
		Client:     client.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
	}
}

// Get implements resourcelock.Interface.
func (l *lock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	l.calls.Lock()
	defer l.calls.Unlock()
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	record, raw, err := l.Interface.Get(ctx)
	switch {
	case err == nil:
		l.term.saw(record, l.clock.Now())
		l.changed()
	case apierrors.IsNotFound(err):
		l.term.notHeld()
		l.changed()
	}
	return record, raw, err
}

// Create implements resourcelock.Interface.
func (l *lock) Create(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Create)
}

// Update implements resourcelock.Interface. The API server rejects it if the Lease has changed since the last read.
func (l *lock) Update(ctx context.Context, record resourcelock.LeaderElectionRecord) error {
	return l.write(ctx, record, l.Interface.Update)
}

func (l *lock) write(ctx context.Context, record resourcelock.LeaderElectionRecord,
	call func(context.Context, resourcelock.LeaderElectionRecord) error) error {
	l.calls.Lock()
	defer l.calls.Unlock()
	ctx, cancel := context.WithTimeout(ctx, l.timeout)
	defer cancel()
	defer l.changed()
	ours := record.HolderIdentity == l.Identity()
	if !ours {
		l.term.notHeld() // Before the write, because the next leader may answer before the write returns here.
	}
	begun := l.clock.Now()
	if err := call(ctx, record); err != nil {
		return err
	}
	if ours {
		l.term.held(begun)
	}
	return nil
}

// release releases the Lease if it is ours, so that the next holder need not wait. The elector must have ended.
func (l *lock) release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	// A renewal that was cancelled here can still reach the API server between the read and the write.
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		record, _, err := l.Get(ctx)
		if err != nil || record.HolderIdentity != l.Identity() {
			return err
		}
		now := metav1.NewTime(l.clock.Now())
		return l.Update(ctx, resourcelock.LeaderElectionRecord{
			LeaseDurationSeconds: 1, AcquireTime: now, RenewTime: now, LeaderTransitions: record.LeaderTransitions,
		})
	})
	if err != nil {
		return fmt.Errorf("releasing Lease %s: %w", l.Describe(), err)
	}
	return nil
}

// begin returns the context of the elector's next attempt, which nudge can cancel.
func (l *lock) begin(ctx context.Context) (context.Context, context.CancelFunc) {
	round, cancel := context.WithCancel(ctx)
	l.calls.Lock()
	defer l.calls.Unlock()
	l.round = cancel
	return round, cancel
}

// nudge makes a standby try for the Lease now instead of after its retry period. It doesn't cancel a call.
func (l *lock) nudge() {
	l.calls.Lock()
	defer l.calls.Unlock()
	if l.round != nil && !l.term.holding(l.clock.Now()) {
		l.round()
	}
}

// watch calls nudge when the Lease is free, and records when renewals by other replicas were seen, until ctx ends.
func (l *lock) watch(ctx context.Context, client kubernetes.Interface, namespace string) error {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(namespace),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, LeaseName).String()
		}))
	look := func(object any) {
		record := resourcelock.LeaseSpecToLeaderElectionRecord(&object.(*coordinationv1.Lease).Spec)
		l.term.watched(record, l.clock.Now())
		if record.HolderIdentity == "" {
			l.nudge()
		}
	}
	_, err := factory.Coordination().V1().Leases().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    look,
		UpdateFunc: func(_, object any) { look(object) },
		DeleteFunc: func(any) { l.nudge() },
	})
	if err != nil {
		return fmt.Errorf("watching Lease %s: %w", l.Describe(), err)
	}
	factory.StartWithContext(ctx)
	<-ctx.Done()
	factory.Shutdown()
	return nil
}

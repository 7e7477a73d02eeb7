package leader

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// ErrNotLeading is wrapped by all reasons not to answer. Their texts are constant: kube-scheduler shows them on pods.
var ErrNotLeading = errors.New("this replica doesn't lead")

// The reasons not to answer.
var (
	ErrStandingBy = fmt.Errorf("%w: it is a standby", ErrNotLeading)
	ErrLapsed     = fmt.Errorf("%w: it could not renew its Lease in time", ErrNotLeading)
	ErrWaiting    = fmt.Errorf("%w yet: writes of the former leader may still be in flight", ErrNotLeading)
	ErrTakingOver = fmt.Errorf("%w yet: it is reading what the former leader wrote", ErrNotLeading)
	ErrStopping   = fmt.Errorf("%w any more: it is stopping", ErrNotLeading)
)

// phase is a replica's state between standby and leader.
type phase int

const (
	standingBy phase = iota
	// lapsed: the last renewal of our Lease is older than the renew deadline.
	lapsed
	// waiting: the Lease is ours, and writes of the former leader can still take effect.
	waiting
	// takingOver: all of these writes are visible, and are being read.
	takingOver
	leading
)

// err returns the error of Leading in this phase, nil for leading.
func (p phase) err() error {
	return [...]error{standingBy: ErrStandingBy, lapsed: ErrLapsed, waiting: ErrWaiting, takingOver: ErrTakingOver, leading: nil}[p]
}

func (p phase) String() string {
	return [...]string{standingBy: "standing by", lapsed: "lapsed", waiting: "waiting", takingOver: "taking over", leading: "leading"}[p]
}

// sighting is a state of the Lease under another holder, and when it was first seen, which is after the holder's write.
type sighting struct {
	holder   string
	renewed  time.Time // By the holder's clock: compared for equality only.
	duration time.Duration
	at       time.Time
}

func newSighting(record *resourcelock.LeaderElectionRecord, at time.Time) sighting {
	return sighting{
		holder: record.HolderIdentity, renewed: record.RenewTime.Time,
		duration: time.Duration(record.LeaseDurationSeconds) * time.Second, at: at,
	}
}

func (s sighting) same(other sighting) bool {
	return s.holder == other.holder && s.renewed.Equal(other.renewed)
}

// term decides whether this replica leads. It makes no calls and reads no clock: its methods take the results of calls and
// the time. They are safe for concurrent use.
type term struct {
	identity string
	// renewDeadline is how long a renewal counts.
	renewDeadline time.Duration
	// bindDeadline is how long after the last check of Leading a write can still take effect.
	bindDeadline time.Duration

	mu sync.Mutex
	// renewed is when the last successful write that made us the holder was sent; zero while the Lease isn't ours.
	renewed time.Time
	// former is the last other holder, unless it released the Lease.
	former sighting
	// heard is the last state that the watch reported. It is only used for its time, because a watch can lag.
	heard sighting
	// answersFrom is when all writes of the former leader are visible.
	answersFrom time.Time
	// number counts our terms; tookOver is the last term whose takeover is done.
	number, tookOver uint64
}

// saw records the Lease as returned by a live read.
func (t *term) saw(record *resourcelock.LeaderElectionRecord, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch record.HolderIdentity {
	case t.identity:
		// Ours, possibly by a write whose answer was lost. Only a write that succeeds counts.
	case "":
		t.renewed, t.former = time.Time{}, sighting{}
	default:
		t.renewed = time.Time{}
		s := newSighting(record, now)
		switch {
		case s.same(t.former): // Not renewed since.
		case s.same(t.heard):
			t.former = t.heard
		default:
			t.former = s
		}
	}
}

// watched records the Lease as reported by the watch.
func (t *term) watched(record *resourcelock.LeaderElectionRecord, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := newSighting(record, now); !s.same(t.heard) {
		t.heard = s
	}
}

// notHeld records that the Lease isn't ours: it was deleted, perhaps unnoticed by its holder, or is about to be released.
func (t *term) notHeld() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.renewed = time.Time{}
}

// held records a successful write, sent at the given time, that made us the holder.
func (t *term) held(begun time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.renewed.IsZero() {
		t.number++
		t.answersFrom = time.Time{}
		if t.former.holder != "" {
			t.answersFrom = t.former.at.Add(t.former.duration + t.bindDeadline)
		}
	}
	t.renewed = begun
}

// finished records that the takeover of the given term is done.
func (t *term) finished(number uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tookOver = max(t.tookOver, number)
}

// status is the state of a term at one moment.
type status struct {
	phase  phase
	number uint64
	// until is when the phase ends by itself; zero if it doesn't.
	until time.Time
}

func (t *term) status(now time.Time) status {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := status{number: t.number, until: t.renewed.Add(t.renewDeadline)}
	switch {
	case t.renewed.IsZero():
		return status{phase: standingBy, number: t.number}
	case elapsed(t.renewed, now) >= t.renewDeadline:
		return status{phase: lapsed, number: t.number}
	case now.Before(t.answersFrom):
		s.phase = waiting
		if t.answersFrom.Before(s.until) {
			s.until = t.answersFrom
		}
	case t.tookOver < t.number:
		s.phase = takingOver
	default:
		s.phase = leading
	}
	return s
}

// holding reports whether the Lease is certainly ours, whether or not we answer yet.
func (t *term) holding(now time.Time) bool { return t.status(now).phase >= waiting }

// mayRelease reports whether the next leader may answer at once. A replica that releases the Lease while it still waits
// for its predecessor's writes would make its successor not wait for them.
func (t *term) mayRelease(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.renewed.IsZero() && !now.Before(t.answersFrom)
}

// elapsed returns the longer of the durations by the monotonic clock, which can stop while a machine is suspended, and by the
// wall clock, which can be set back. If it is set forward, the replica pauses until its next renewal at worst.
func elapsed(from, to time.Time) time.Duration {
	return max(to.Sub(from), to.Round(0).Sub(from.Round(0)))
}

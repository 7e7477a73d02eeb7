package leader

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// ErrNotLeading is what all reasons not to answer wrap. Their texts are constant: kube-scheduler shows them on pods.
var ErrNotLeading = errors.New("this replica doesn't lead")

// The reasons not to answer.
var (
	ErrStandingBy = fmt.Errorf("%w: it stands by", ErrNotLeading)
	ErrLapsed     = fmt.Errorf("%w: it could not renew its Lease in time", ErrNotLeading)
	ErrWaiting    = fmt.Errorf("%w yet: writes of the former leader may still be under way", ErrNotLeading)
	ErrTakingOver = fmt.Errorf("%w yet: it reads what the former leader wrote", ErrNotLeading)
	ErrStopping   = fmt.Errorf("%w any more: it is stopping", ErrNotLeading)
)

// phase is how far a replica has come on the way to leading.
type phase int

const (
	standingBy phase = iota
	// lapsed: the Lease may still be ours, but was renewed too long ago to count on it.
	lapsed
	// waiting: the Lease is ours, and writes of the former leader may still appear.
	waiting
	// takingOver: they have all appeared, and are to be read.
	takingOver
	leading
)

// err returns why a replica in this phase doesn't lead, or nil.
func (p phase) err() error {
	return [...]error{standingBy: ErrStandingBy, lapsed: ErrLapsed, waiting: ErrWaiting, takingOver: ErrTakingOver, leading: nil}[p]
}

func (p phase) String() string {
	return [...]string{standingBy: "standing by", lapsed: "lapsed", waiting: "waiting", takingOver: "taking over", leading: "leading"}[p]
}

// sighting is one state of the Lease under another holder, and when it was seen first: the write that made it was
// begun before.
type sighting struct {
	holder   string
	renewed  time.Time // By the holder's clock: it tells states apart, and is compared with nothing else.
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

// term decides whether this replica leads. It makes no call and reads no clock: it is told what came of calls, and the
// time. Its methods may be called from many goroutines.
type term struct {
	identity string
	// renewDeadline is how long a renewal counts.
	renewDeadline time.Duration
	// bindDeadline is how long after its last look at Leading a write may still appear.
	bindDeadline time.Duration

	mu sync.Mutex
	// renewed is when the last successful write that made us the holder was begun; zero while the Lease isn't ours.
	renewed time.Time
	// former is the last other holder, unless it released the Lease.
	former sighting
	// heard is the last state that the watch told of. It only dates sightings: a watch may lag.
	heard sighting
	// answersFrom is when the former leader's writes have all appeared.
	answersFrom time.Time
	// number counts the times that the Lease became ours; tookOver is the last of them whose taking over is done.
	number, tookOver uint64
}

// saw notes the Lease as a live read found it.
func (t *term) saw(record *resourcelock.LeaderElectionRecord, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch record.HolderIdentity {
	case t.identity:
		// Ours; or an attempt whose answer was lost has made it so. A write that succeeds will tell.
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

// watched notes the Lease as the watch tells of it.
func (t *term) watched(record *resourcelock.LeaderElectionRecord, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := newSighting(record, now); !s.same(t.heard) {
		t.heard = s
	}
}

// sawNone notes that there is no Lease: somebody has deleted it. Who held it may not know yet.
func (t *term) sawNone() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.renewed = time.Time{}
}

// held notes that a write succeeded that was begun at that time and made us the holder.
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

// finished notes that taking over in the term of that number is done.
func (t *term) finished(number uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.tookOver = max(t.tookOver, number)
}

// resign notes that we are about to give the Lease up.
func (t *term) resign() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.renewed = time.Time{}
}

// status is what a term says of one moment.
type status struct {
	phase  phase
	number uint64
	// until is when the phase ends if nothing happens before; zero where it doesn't end by itself.
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

// holding says whether the Lease is ours for certain, whether we answer already or not.
func (t *term) holding(now time.Time) bool { return t.status(now).phase >= waiting }

// mayRelease says whether the next leader may answer at once, for all we know: a replica that gave the Lease up while
// it still waited for the writes of its predecessor would have its successor not wait for them.
func (t *term) mayRelease(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return !t.renewed.IsZero() && !now.Before(t.answersFrom)
}

// elapsed is the longer of what the two clocks say: the monotonic one may stand still while a machine is suspended, and
// the other one may be set back. Where it is set forward, the worst is a pause until the next renewal.
func elapsed(from, to time.Time) time.Duration {
	return max(to.Sub(from), to.Round(0).Sub(from.Round(0)))
}

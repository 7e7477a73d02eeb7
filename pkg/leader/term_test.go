package leader

import (
	"errors"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// at returns the time that many seconds after the epoch.
func at(seconds float64) time.Time { return epoch.Add(time.Duration(seconds * float64(time.Second))) }

// by returns a Lease with that holder, renewed at that second of the holder's clock.
func by(holder string, renewed float64) *resourcelock.LeaderElectionRecord {
	return &resourcelock.LeaderElectionRecord{
		HolderIdentity: holder, LeaseDurationSeconds: 15, RenewTime: metav1.NewTime(at(renewed)),
	}
}

// Each row is a history of the Lease for a term of "us", with a renew deadline of 10 s, a lease of 15 s and a bind
// deadline of 13 s.
func TestTerm(t *testing.T) {
	type moment struct {
		second float64
		want   phase
	}
	took := func(t *term) { t.finished(t.number) }
	tests := map[string]struct {
		history func(*term)
		want    []moment
	}{
		"unknown Lease": {
			func(*term) {}, []moment{{0, standingBy}, {100, standingBy}},
		},
		"without a former leader there is no wait, only the first reads": {
			func(u *term) { u.notHeld(); u.held(at(1)) }, []moment{{1, takingOver}, {10.9, takingOver}, {11, lapsed}},
		},
		"a renewal is valid from its start for the renew deadline": {
			func(u *term) { u.notHeld(); u.held(at(1)); took(u); u.held(at(3)) },
			[]moment{{3, leading}, {12.9, leading}, {13, lapsed}, {1000, lapsed}},
		},
		"a lapsed leader that still holds the Lease continues": {
			func(u *term) { u.notHeld(); u.held(at(1)); took(u); u.saw(by("us", 1), at(14)); u.held(at(14)) },
			[]moment{{14, leading}},
		},
		"a released Lease needs no wait": {
			func(u *term) { u.saw(by("them", 1), at(1)); u.saw(by("", 2), at(2)); u.held(at(2)); took(u) },
			[]moment{{2, leading}},
		},
		"after a silent holder, its lease duration and bind deadline must pass": {
			func(u *term) {
				u.saw(by("them", 1), at(1))
				for second := 3.0; second <= 16; second++ {
					u.saw(by("them", 1), at(second))
				}
				u.held(at(20))
				took(u)
				u.held(at(22))
				u.held(at(28))
			},
			[]moment{{28, waiting}, {28.9, waiting}, {29, leading}},
		},
		"that time starts at the last change in a read": {
			func(u *term) { u.saw(by("them", 1), at(1)); u.saw(by("them", 3), at(4)); u.held(at(25)); took(u) },
			[]moment{{31.9, waiting}, {32, leading}},
		},
		"or at the last change in the watch, if that is earlier": {
			func(u *term) {
				u.watched(by("them", 3), at(3))
				u.watched(by("them", 3), at(3.5))
				u.saw(by("them", 3), at(7))
				u.held(at(25))
				took(u)
			},
			[]moment{{30.9, waiting}, {31, leading}},
		},
		"a late watch event has no effect": {
			func(u *term) {
				u.saw(by("them", 3), at(3))
				u.saw(by("", 4), at(4))
				u.watched(by("them", 3), at(5))
				u.held(at(5))
				took(u)
				u.watched(by("", 4), at(6))
			},
			[]moment{{6, leading}},
		},
		"a lost answer to the winning write doesn't shorten the wait": {
			func(u *term) { u.saw(by("them", 1), at(1)); u.saw(by("us", 17), at(19)); u.held(at(19)); took(u) },
			[]moment{{28.9, waiting}, {29, lapsed}},
		},
		"a leader that sees another holder stops leading": {
			func(u *term) { u.notHeld(); u.held(at(1)); took(u); u.saw(by("them", 2), at(2)) },
			[]moment{{2, standingBy}},
		},
		"a leader whose Lease was deleted, or is being released, stops leading": {
			func(u *term) { u.notHeld(); u.held(at(1)); took(u); u.notHeld() },
			[]moment{{2, standingBy}},
		},
		"after the deletion of another holder's Lease, the wait is needed": {
			func(u *term) { u.saw(by("them", 1), at(1)); u.notHeld(); u.held(at(2)); took(u) },
			[]moment{{2, waiting}},
		},
		"a second term takes over again": {
			func(u *term) {
				u.notHeld()
				u.held(at(1))
				took(u)
				u.saw(by("them", 2), at(2))
				u.saw(by("", 3), at(3))
				u.held(at(3))
			},
			[]moment{{3, takingOver}},
		},
		"a takeover that ends after its term has no effect": {
			func(u *term) {
				u.notHeld()
				u.held(at(1))
				number := u.number
				u.saw(by("", 3), at(3))
				u.held(at(3))
				u.finished(number)
			},
			[]moment{{3, takingOver}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			u := &term{identity: "us", renewDeadline: 10 * time.Second, bindDeadline: 13 * time.Second}
			test.history(u)
			for _, m := range test.want {
				s := u.status(at(m.second))
				if s.phase != m.want {
					t.Errorf("at second %v: %v, want %v", m.second, s.phase, m.want)
				}
				if err := s.phase.err(); (err == nil) != (m.want == leading) || err != nil && !errors.Is(err, ErrNotLeading) {
					t.Errorf("at second %v: error %v", m.second, err)
				}
				if s.until.IsZero() != (m.want < waiting) || !s.until.IsZero() && u.status(s.until).phase == s.phase {
					t.Errorf("at second %v: %v until %v, and then %v", m.second, s.phase, s.until, u.status(s.until).phase)
				}
			}
		})
	}
}

func TestMayRelease(t *testing.T) {
	tests := map[string]struct {
		history func(*term)
		second  float64
		want    bool
	}{
		"not held":         {func(*term) {}, 1, false},
		"no former holder": {func(u *term) { u.notHeld(); u.held(at(1)) }, 1, true},
		"the former holder's writes can take effect": {func(u *term) { u.saw(by("them", 1), at(1)); u.held(at(20)) }, 28.9, false},
		"the former holder's writes have ended":      {func(u *term) { u.saw(by("them", 1), at(1)); u.held(at(20)) }, 29, true},
		"lapsed":                                     {func(u *term) { u.notHeld(); u.held(at(1)) }, 14, true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			u := &term{identity: "us", renewDeadline: 10 * time.Second, bindDeadline: 13 * time.Second}
			test.history(u)
			if got := u.mayRelease(at(test.second)); got != test.want {
				t.Errorf("%v, want %v", got, test.want)
			}
		})
	}
}

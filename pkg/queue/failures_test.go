package queue

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

var begin = time.Unix(1_800_000_000, 0)

const patience = 30 * time.Second

// scene is a namespace whose items are placed as soon as they may be.
type scene struct {
	*testing.T
	Failures
	now time.Time
	// reserved has the IDs of the items with awaited reservations.
	reserved map[string]bool
}

func newScene(t *testing.T) *scene { return &scene{T: t, now: begin, reserved: map[string]bool{}} }

// item returns an item of one card.
func item(id, shape string, memory gpu.Memory) Profile {
	return Profile{Namespace: "a", ID: id, ShapeKey: shape, Size: Size{memory, 1}}
}

// await waits until the item may be placed, and returns for how long.
func (s *scene) await(i Profile) time.Duration {
	from := s.now
	for until := s.until(i); until.After(s.now); until = s.until(i) {
		s.now = until
	}
	return s.now.Sub(from)
}

func (s *scene) until(i Profile) time.Time {
	until, _ := s.PauseUntil(i, s.reserved[i.ID], s.now)
	return until
}

// fail places the item as soon as it may be, lets it fail, and returns for how long it waited.
func (s *scene) fail(i Profile) time.Duration {
	waited := s.await(i)
	s.Placed(i)
	placed := s.now
	s.now = s.now.Add(patience)
	s.Failed(i, placed, s.now)
	return waited
}

// waits returns for how long the item would have to wait now.
func (s *scene) waits(i Profile) time.Duration {
	return max(s.until(i).Sub(s.now), 0)
}

// TestPauses: the pauses of a shape whose items always fail, although each item has another ID.
func TestPauses(t *testing.T) {
	s := newScene(t)
	var got []time.Duration
	for n := range 13 {
		i := item(fmt.Sprint("run-", n), "shape", 8)
		i.CompletesGroup = true // So it waits for no turn.
		got = append(got, s.fail(i))
	}
	if got, want := fmt.Sprint(got), "[0s 1s 2s 4s 8s 16s 32s 1m4s 2m8s 4m16s 8m32s 10m0s 10m0s]"; got != want {
		t.Errorf("pauses %s, want %s", got, want)
	}
	if n, at := s.CountOf(item("other", "shape", 8)); n != 13 || at != s.now {
		t.Errorf("%d have failed, the latest at %v, want 13 and %v", n, at, s.now)
	}
	if n, at := s.CountOf(item("other", "another", 8)); n != 0 || !at.IsZero() {
		t.Errorf("of another shape, %d have failed, the latest at %v", n, at)
	}
}

// TestSchedulerAway: while kube-scheduler is away, all items fail. That is forgotten when it is back and tries them, but not what had failed before.
func TestSchedulerAway(t *testing.T) {
	for name, tc := range map[string]struct {
		// before and then are how often the item fails: the latter while kube-scheduler is away, or tries other pods.
		before, then int
		others       bool
		// tried is the namespace of the pod that kube-scheduler tries last. The item's is a.
		tried string
		want  time.Duration
	}{
		"it is away":                          {0, 10, false, "a", 0},
		"it is away after a failure":          {1, 10, false, "a", 0},
		"it is away for a short time":         {0, 2, false, "a", 4 * time.Second},
		"it is there":                         {2, 0, false, "a", 4 * time.Second},
		"it tries other pods meanwhile":       {0, 10, true, "a", 17*time.Minute + 4*time.Second},
		"it tries other pods afterwards only": {0, 10, false, "b", 17*time.Minute + 4*time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			one := item("one", "shape", 8)
			tried := func(namespace string) { s.SchedulerSeen(namespace, s.now) }
			tried("b")
			for range tc.before {
				s.fail(one)
			}
			tried("a")
			for range tc.then {
				for until := s.now.Add(s.waits(one)); tc.others && s.now.Before(until); s.now = s.now.Add(time.Second) {
					tried("b")
				}
				s.fail(one)
			}
			tried("b")
			tried(tc.tried)
			if got := s.waits(one); got != tc.want {
				t.Errorf("it waits for %v, want %v", got, tc.want)
			}
		})
	}
}

// TestTriedBeforeItFailed: a group that kube-scheduler has tried before it failed is no better once its controller makes it again, although
// kube-scheduler had nothing to try meanwhile.
func TestTriedBeforeItFailed(t *testing.T) {
	s := newScene(t)
	group := item("group", "shape", 8)
	s.Placed(group)
	placed := s.now
	for _, event := range []func(){
		func() { s.SchedulerSeen("a", s.now) },
		func() { s.Failed(group, placed, s.now) },
		func() { s.SchedulerSeen("a", s.now) },
	} {
		s.now = s.now.Add(KubeSchedulerRetries + time.Second)
		event()
	}
	if failures, _ := s.CountOf(group); failures != 1 {
		t.Errorf("%d failures are remembered", failures)
	}
}

// TestFailures: for how long items wait after others have failed.
func TestFailures(t *testing.T) {
	// After one failure; others are the turns of shapes that have not failed.
	const free, paused, turn, others = 0, time.Second, 2 * time.Second, time.Second
	large, small := item("large", "large", 64), item("small", "small", 8)
	other := large
	other.Namespace = "b"
	for name, tc := range map[string]struct {
		after func(s *scene)
		of    Profile
		want  time.Duration
	}{
		"nothing has failed":                           {func(*scene) {}, large, free},
		"the same item":                                {func(s *scene) { s.fail(large) }, large, turn},
		"another shape":                                {func(s *scene) { s.fail(large) }, small, others},
		"another namespace":                            {func(s *scene) { s.fail(large) }, other, free},
		"what is bound of it wastes memory":            {func(s *scene) { s.fail(large) }, Profile{Namespace: "a", ID: "x", ShapeKey: "x", CompletesGroup: true}, free},
		"that, and its shape has failed":               {func(s *scene) { s.fail(large) }, Profile{Namespace: "a", ID: "x", ShapeKey: "large", CompletesGroup: true}, paused},
		"it arrived":                                   {func(s *scene) { s.fail(large); s.Arrived(large) }, large, free},
		"it arrived, and another shape waits":          {func(s *scene) { s.fail(large); s.Arrived(large) }, small, free},
		"a small one arrived":                          {func(s *scene) { s.fail(large); s.Arrived(small) }, large, turn},
		"a small one arrived, and is next":             {func(s *scene) { s.fail(large); s.Arrived(small) }, small, free},
		"a small one arrived, then failed":             {func(s *scene) { s.fail(large); s.Arrived(small); s.fail(small) }, item("x", "x", 8), 2 * others},
		"a large one arrived after a small one failed": {func(s *scene) { s.fail(small); s.Arrived(large) }, item("x", "x", 8), free},
		"that, and it has the shape":                   {func(s *scene) { s.fail(small); s.Arrived(large) }, small, paused},
		"fewer cards arrived": {func(s *scene) {
			s.Failed(Profile{Namespace: "a", ID: "cards", ShapeKey: "cards", Size: Size{16, 2}}, s.now, s.now)
			s.Arrived(large)
		}, Profile{Namespace: "a", ID: "x", ShapeKey: "x", Size: Size{16, 2}}, others},
		"another one is placed": {func(s *scene) {
			s.fail(large)
			s.await(large)
			s.Placed(large)
			s.now = s.now.Add(time.Hour)
		}, small, paused},
		"another one was placed, and lost its memory": {func(s *scene) {
			s.fail(large)
			s.await(large)
			s.Placed(large)
			s.Ended(large)
		}, small, free},
		"ten failed at the same time": {func(s *scene) {
			for n := range 10 {
				s.Failed(item(fmt.Sprint(n), fmt.Sprint("shape ", n), 64), s.now.Add(-patience), s.now)
			}
		}, small, others},
		"one failed twice, as two components report": {func(s *scene) {
			s.fail(large)
			s.Failed(large, s.now.Add(-patience), s.now)
		}, large, turn},
		"another one failed, and it has an awaited reservation since": {func(s *scene) { s.fail(small); s.await(large); s.reserved["large"] = true; s.fail(small) }, large, free},
		"that has ended": {func(s *scene) {
			s.fail(small)
			s.await(large)
			s.reserved["large"] = true
			s.fail(small)
			s.reserved["large"] = false
		}, large, 2 * others},
		"it has an awaited reservation before the first failure": {func(s *scene) { s.reserved["large"] = true; s.fail(small) }, large, free},
		"that, and one arrived and failed again":                 {func(s *scene) { s.reserved["large"] = true; s.fail(small); s.Arrived(small); s.fail(small) }, large, free},
		"it ended before the first failure":                      {func(s *scene) { s.reserved["large"] = true; s.reserved["large"] = false; s.fail(small) }, large, others},
		"another one of its shape fails although it has one":     {func(s *scene) { s.reserved["large"] = true; s.fail(item("x", "large", 64)) }, large, turn},
		"one with an awaited reservation was placed beside another one, and lost its memory": {func(s *scene) {
			s.fail(small)
			s.reserved["large"] = true
			other := item("x", "x", 64)
			s.await(other)
			s.Placed(other)
			s.Placed(large)
			s.Ended(large)
		}, item("y", "y", 64), paused},
		"its shape fails although it has one": {func(s *scene) { s.fail(small); s.await(large); s.reserved["large"] = true; s.fail(large) }, large, 2 * turn},
		"its memory is free": {func(s *scene) {
			s.fail(small)
			s.await(large)
			s.reserved["large"] = true
			s.fail(small)
			s.Placed(large)
			s.reserved["large"] = false
		}, large, free},
		"an hour later":  {func(s *scene) { s.fail(large); s.now = s.now.Add(time.Hour) }, large, free},
		"the term ended": {func(s *scene) { s.fail(large); s.Clear() }, large, free},
		"twenty failed in a row": {func(s *scene) {
			for n := range 20 {
				s.fail(item(fmt.Sprint(n), fmt.Sprint("shape ", n), 64))
			}
		}, small, LongestPause},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			tc.after(s)
			if got := s.waits(tc.of); got != tc.want {
				t.Errorf("%v, want %v", got, tc.want)
			}
		})
	}
}

// TestHostileNamespace: a namespace whose items always fail, each with another shape, keeps memory for no more than one item, a twentieth of the
// time, once it has failed for half an hour. Tiny items that arrive don't change that.
func TestHostileNamespace(t *testing.T) {
	for name, tiny := range map[string]bool{"all fail": false, "tiny ones arrive": true} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			kept, placed := time.Duration(0), map[string]time.Time{}
			end := begin.Add(12 * time.Hour)
			for n := 0; s.now.Before(end); s.now = s.now.Add(time.Second) {
				for id, at := range placed {
					if s.now.Sub(at) >= patience {
						s.Failed(item(id, id, 64), at, s.now)
						delete(placed, id)
					}
				}
				for range 40 {
					n++
					next := item(fmt.Sprint(n), fmt.Sprint(n), 64)
					if s.until(next).After(s.now) {
						break
					}
					s.Placed(next)
					placed[next.ID] = s.now
				}
				if tiny {
					s.Arrived(item("tiny", "tiny", 1))
				}
				if s.now.Sub(begin) > 30*time.Minute {
					kept += time.Duration(len(placed)) * time.Second
				}
			}
			if part := kept.Seconds() / end.Sub(begin).Seconds(); part > 0.05 || part == 0 {
				t.Errorf("keeps the memory of an item for %.1f%% of the time", 100*part)
			}
			if n := len(s.namespaces["a"].shapes); n > 100 {
				t.Errorf("%d shapes are remembered", n)
			}
		})
	}
}

// TestHealthyAmongBroken: a healthy item of a namespace in which 40 others always fail is placed, once for each of them at the latest.
func TestHealthyAmongBroken(t *testing.T) {
	s := newScene(t)
	for n := range 40 {
		s.fail(item(fmt.Sprint("broken-", n), fmt.Sprint("broken-", n), 64))
	}
	healthy := item("healthy", "healthy", 64)
	if waited := s.await(healthy); waited > LongestPause {
		t.Errorf("it waits for %v", waited)
	}
	s.Placed(healthy)
	s.Arrived(healthy)
	if waited := s.await(item("x", "x", 64)); waited > 0 {
		t.Errorf("the next one waits for %v", waited)
	}
}

// TestNoRoomForHours: an item that waits for room for hours between its failures pauses for longer each time, also if others fail meanwhile.
func TestNoRoomForHours(t *testing.T) {
	s := newScene(t)
	i := item("large", "large", 64)
	for n := range 5 {
		s.fail(i)
		if got, want := s.waits(i), minPause<<(n+1); got != want {
			t.Errorf("after failure %d: waits for %v, want %v", n, got, want)
		}
		for range 20 {
			s.now = s.now.Add(10 * time.Minute)
			s.waits(i)
			s.Failed(Profile{Namespace: "other", ID: "x", ShapeKey: "x"}, s.now, s.now)
		}
	}
}

// TestForgottenInQuiet: failures are forgotten after an hour without an item of their shape, also if nothing fails meanwhile, and nothing waits.
func TestForgottenInQuiet(t *testing.T) {
	s := newScene(t)
	for range 8 {
		s.fail(item("broken", "shape", 64))
	}
	s.now = s.now.Add(forgetAfter + time.Second)
	mended := item("mended", "shape", 64)
	if waits := s.waits(mended); waits > 0 {
		t.Errorf("it waits for %v", waits)
	}
	if failures, _ := s.CountOf(mended); failures > 0 {
		t.Errorf("%d failures are remembered", failures)
	}
}

// TestForgotten: nothing is left of namespaces that have failed once, or whose items have arrived.
func TestForgotten(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	s := newScene(t)
	for n := range 2000 {
		i := item(fmt.Sprint(n), fmt.Sprint(random.IntN(100)), gpu.Memory(random.IntN(100)))
		i.Namespace = fmt.Sprint("namespace-", n/10)
		switch s.now = s.now.Add(time.Minute); random.IntN(4) {
		case 0:
			s.Arrived(i)
		case 1:
			s.Placed(i)
			s.Ended(i)
		default:
			s.Failed(i, s.now, s.now)
		}
	}
	if n := len(s.namespaces); n > 10 {
		t.Errorf("%d namespaces are remembered", n)
	}
}

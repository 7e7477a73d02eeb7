package gang

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// failing is a cluster with groups of other namespaces of which some pods never reach bind.
type failing struct {
	*fixture
	// never are the pods that kube-scheduler doesn't schedule.
	never map[*pod]bool
	// kept is the memory that groups with such pods kept reserved, times seconds.
	kept float64
}

func newFailing(t *testing.T) *failing {
	s := &failing{fixture: newFixture(t), never: map[*pod]bool{}}
	s.awaited = nil
	return s
}

// group creates a group of n whole cards in a namespace. If broken is true, its last pod never reaches bind.
func (s *failing) group(namespace, name string, n int, priority int32, broken bool) (pods []*pod) {
	s.namespace = namespace
	for range n {
		s.create(name, n, 16, "t")
		p := s.created[len(s.created)-1]
		p.Priority = priority
		s.report(p)
		pods = append(pods, p)
	}
	if broken {
		s.never[pods[n-1]] = true
	}
	return pods
}

// again replaces all pods, as a CronJob does.
func (s *failing) again(pods []*pod) []*pod {
	first := pods[0]
	for _, p := range pods {
		s.delete(p)
	}
	return s.group(first.Namespace, first.Gang.Name, len(pods), first.Priority, s.never[pods[len(pods)-1]])
}

// step lets a second pass in which kube-scheduler tries all pods.
func (s *failing) step() {
	for _, p := range s.existing() {
		if p.queued = p.Node == "" && !s.inBind(p) && !s.never[p]; p.queued {
			s.schedule(p)
		}
	}
	s.performEffects()
	s.bindGranted()
	s.advance(time.Second)
	for p := range s.never {
		if r := s.manager.members[p.UID]; r != nil && r.run.plan != nil {
			s.kept += float64(p.Request) * float64(p.Size)
		}
	}
}

// run lets time pass until all of the pods are bound, and returns for how long it waited. then is called before each second.
func (s *failing) run(pods []*pod, atMost time.Duration, then func()) time.Duration {
	begun := s.now
	for end := s.now.Add(atMost); s.now.Before(end); s.step() {
		if then != nil {
			then()
		}
		n := 0
		for _, p := range pods {
			if p.Node != "" {
				n++
			}
		}
		if n == len(pods) {
			break
		}
	}
	return s.now.Sub(begun)
}

// every returns a function that calls f once in d.
func (s *failing) every(d time.Duration, f func()) func() {
	next := s.now
	return func() {
		if !s.now.Before(next) {
			next = s.now.Add(d)
			f()
		}
	}
}

// TestFailingGroups: groups that can't run keep others from their memory only for a short time.
func TestFailingGroups(t *testing.T) {
	for name, tc := range map[string]struct {
		// before sets the scene, and returns what is done each second, if anything.
		before func(s *failing) func()
		// need is the size of healthy groups that come one after the other.
		need int
	}{
		"a CronJob makes one of half the cluster again every five minutes": {func(s *failing) func() {
			never := s.group("a", "never", 4, 0, true)
			return s.every(5*time.Minute, func() { never = s.again(never) })
		}, 8},
		"one of higher priority": {func(s *failing) func() { s.group("a", "never", 8, 1, true); return func() {} }, 8},
		"one of higher priority, made again every 20 seconds": {func(s *failing) func() {
			never := s.group("a", "never", 8, 1, true)
			return s.every(20*time.Second, func() { never = s.again(never) })
		}, 8},
		"40 of one namespace": {func(s *failing) func() {
			for i := range 40 {
				s.group("a", fmt.Sprint("never-", i), 1+i%4, int32(i), true)
			}
			return func() {}
		}, 8},
		"10 of higher priority, beside tiny groups that run": {func(s *failing) func() {
			for i := range 10 {
				s.group("a", fmt.Sprint("never-", i), 2+i%7, 1, true)
			}
			var tiny *pod
			return s.every(20*time.Second, func() {
				if tiny != nil {
					s.delete(tiny)
				}
				s.namespace = "a"
				s.create("tiny", 1, 1, "tiny")
				tiny = s.created[len(s.created)-1]
			})
		}, 7},
	} {
		for _, fair := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, fair sharing %v", name, fair), func(t *testing.T) {
				s := newFailing(t)
				if fair {
					(&turns{needed: true}).use(s.fixture)
				}
				each := tc.before(s)
				var longest time.Duration
				for n := 0; s.now.Before(begin.Add(time.Hour)); n++ {
					for range 100 {
						each()
						s.step()
					}
					healthy := s.group("b", "healthy", tc.need, 0, false)
					waited := s.run(healthy, time.Hour, each)
					longest = max(longest, waited)
					for _, p := range healthy {
						s.delete(p)
					}
				}
				kept := s.kept / 128 / s.now.Sub(begin).Seconds()
				t.Logf("others waited for %v at most; these kept %.1f%% of the memory", longest, 100*kept)
				if longest > testPatience+testHold {
					t.Errorf("others waited for %v", longest)
				}
				if kept > 0.1 {
					t.Errorf("they kept %.1f%% of the memory reserved", 100*kept)
				}
			})
		}
	}
}

// TestFailedTakesNothing: a group that failed doesn't take the memory of another one, although it goes before that.
func TestFailedTakesNothing(t *testing.T) {
	s := newFailing(t)
	never := s.group("a", "never", 8, 1, true)
	s.manager.Filter(never[0].UID, s.nodes, s.now)
	s.advance(testPatience + 5*time.Second)
	slow := s.group("b", "slow", 8, 0, false)
	s.manager.Filter(slow[0].UID, s.nodes, s.now)
	s.manager.Filter(never[0].UID, s.nodes, s.now)
	s.advance(time.Second)
	if node, _, _ := s.ledger.Lookup(slow[0].UID); node == "" {
		t.Error("the group that had not failed has lost its memory")
	}
	important := s.group("c", "important", 8, 1, false)
	s.manager.Filter(important[0].UID, s.nodes, s.now)
	if node, _, _ := s.ledger.Lookup(important[0].UID); node == "" {
		t.Error("a group that had not failed doesn't take the memory")
	}
}

// TestBreaksAgainAndAgain: a group that breaks whenever it is bound, since a bind always fails, goes before others only for a short time.
func TestBreaksAgainAndAgain(t *testing.T) {
	s := newFailing(t)
	s.group("a", "breaks", 2, 1, false)
	step := func() {
		for _, p := range slices.Backward(s.existing()) { // Members that are created again come first.
			if p.queued = p.Node == "" && !s.inBind(p); p.queued {
				s.schedule(p)
			}
		}
		s.performEffects()
		for len(s.granted) > 0 {
			bind := s.granted[0]
			s.granted = s.granted[1:]
			s.bind(bind, bind.pod.Namespace == "a" && s.memberCounts()["breaks"][0] > 0)
			s.performEffects()
		}
		s.advance(time.Second)
	}
	for range int(time.Hour / time.Second) {
		step()
	}
	s.group("b", "healthy", 8, 0, false)
	from := s.now
	for ; s.memberCounts()["healthy"][0] < 8 && s.now.Sub(from) < 6*time.Hour; step() {
	}
	if waited := s.now.Sub(from); waited > 2*time.Minute {
		t.Errorf("another group waited for %v", waited)
	}
}

// TestBrokenTakesNothingOlder: what a broken group still needs isn't taken from a group that had its memory before the break.
func TestBrokenTakesNothingOlder(t *testing.T) {
	for name, older := range map[string]bool{"older": true, "younger": false} {
		t.Run(name, func(t *testing.T) {
			s := newPhaseScene(t, "binding")
			plan := func(n int) {
				s.namespace = "other"
				s.createMany(n, "other", n, 16, "t")
				s.manager.Filter(s.created[3].UID, s.nodes, s.now)
				s.now = s.now.Add(time.Second)
				s.manager.Tick(s.now)
			}
			if older {
				plan(5)
			}
			for i, bind := range s.granted {
				s.bind(bind, i > 0)
			}
			s.granted = nil
			s.collectDecided()
			if older { // Other pods take what the failed binds have left.
				for range 2 {
					s.create("", 0, 16, "")
					s.scheduleSingle(s.created[len(s.created)-1], s.nodes)
				}
			} else {
				plan(7)
			}
			if got := s.manager.Phases(); got[PhasePlanned] != 1 || got[PhaseBroken] != 1 {
				t.Fatalf("%v", got)
			}
			s.now = s.now.Add(2 * time.Second) // The pause after the failed bind.
			for _, p := range s.created[:3] {
				if p.Node == "" {
					s.manager.Filter(p.UID, s.nodes, s.now)
				}
			}
			if took := s.manager.Phases()[PhaseBroken] == 0; took == older {
				t.Errorf("it takes the memory: %v", took)
			}
		})
	}
}

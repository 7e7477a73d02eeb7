package gang

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// newBrokenScene lets two of four binds succeed. The answer to the third is lost, or it fails.
func newBrokenScene(t *testing.T, lost bool) *fixture {
	s := newFixture(t)
	s.createMany(4, "job", 4, 16, "t")
	s.tryAll()
	if len(s.granted) != 3 {
		t.Fatalf("%d binds are granted, want 3", len(s.granted))
	}
	s.bind(s.granted[0], false)
	s.bind(s.granted[1], false)
	if !lost {
		s.ended(s.granted[2], false)
	}
	s.binds, s.granted = slices.Concat(s.granted, s.held), nil
	return s
}

func (s *fixture) wantPhase(want Phase) {
	s.Helper()
	if s.manager.Phases()[want] != 1 {
		s.Errorf("phases %v, want %v", s.manager.Phases(), want)
	}
}

func (s *fixture) wantNoEviction() {
	s.Helper()
	if len(s.evictions) > 0 {
		s.Errorf("evicted: %v", s.evictions)
	}
}

// TestLostAnswer: the answer to a bind is lost, and long afterwards a live read finds the pod bound. The last member's
// bind call is given up meanwhile, and made again.
func TestLostAnswer(t *testing.T) {
	s := newBrokenScene(t, true)
	last := s.held[0]
	if !s.manager.CancelPermit(last.pod.UID, last.permit, s.now) {
		t.Fatal("the last member's call could not be given up")
	}
	s.held = nil
	s.advance(testPatience / 2)
	s.wantPhase(PhaseBinding)
	lost := s.created[2].Member
	lost.Node = "n1"
	s.manager.Confirmed(lost, s.now)
	result := s.manager.filterAll(last.pod.UID, s.nodes, s.now)
	if !slices.Equal(result.Nodes, []string{last.node}) {
		t.Fatalf("the last member may go to %v, want %s: %s", result.Nodes, last.node, result.Reason.Text())
	}
	permit := s.manager.RequestPermit(last.pod.UID, last.node, s.now)
	<-permit.Decided
	if permit.Rejection != nil || !permit.MarkWhole || permit.OpenedAt != s.now {
		t.Errorf("rejection %v, completes %t, opened at %v", permit.Rejection, permit.MarkWhole, permit.OpenedAt)
	}
	s.manager.Bound(last.pod.UID, last.node, permit, s.now)
	s.advance(10 * testPatience)
	s.wantPhase(PhaseRunning)
	s.wantNoEviction()
}

// TestLastFoundBound: the last member's bind call is held when an earlier bind turns out to have bound it. The call is answered, also if another
// member can't be bound.
func TestLastFoundBound(t *testing.T) {
	s := newBrokenScene(t, true)
	last := s.held[0]
	found := last.pod.Member
	found.Node = last.node
	s.manager.SetMember(found, s.now)
	s.done(2, false)
	s.wantPhase(PhaseBroken)
	select {
	case <-last.permit.Decided:
	default:
		t.Error("the bind call is held for ever")
	}
}

// TestLastPlaceLost: the last member's place is gone when kube-scheduler makes its bind call again, long after the plan. The run is broken as soon
// as the other binds have ended.
func TestLastPlaceLost(t *testing.T) {
	s := newBrokenScene(t, true)
	last := s.held[0]
	s.advance(2 * testPatience)
	s.ledger.SetNode(last.node, ledger.NodeSpec{Unit: gpu.GiB})
	if reason := s.manager.RequestPermit(last.pod.UID, last.node, s.now).Rejection; reason == nil || *reason != reasons.GroupPlaceLost {
		t.Fatalf("rejected: %v, want %v", reason, reasons.GroupPlaceLost)
	}
	s.wantPhase(PhaseBinding)
	s.done(2, true)
	s.wantPhase(PhaseBroken)
}

// TestFrozenProcess: while the process is frozen, nothing is known of the API server, so that isn't patience.
func TestFrozenProcess(t *testing.T) {
	s := newBrokenScene(t, false)
	s.advance(2 * time.Second)
	s.now = s.now.Add(10 * testPatience)
	s.advance(testPatience / 2)
	s.wantNoEviction()
	s.advance(testPatience)
	if len(s.evictions) == 0 {
		t.Error("no eviction, though the API server answered for longer than the patience")
	}
}

// TestLostAnswers: whatever becomes of a bind whose answer was lost, and of the last member.
func TestLostAnswers(t *testing.T) {
	for name, tc := range map[string]struct {
		then func(s *fixture)
		want string
	}{
		"nothing is known yet": {func(*fixture) {}, "binding"},
		"it failed":            {func(s *fixture) { s.done(2, false) }, "broken"},
		"it succeeded, and so does the last one": {func(s *fixture) {
			s.done(2, true)
			s.done(3, true)
		}, "running"},
		"the pod is gone":      {func(s *fixture) { s.manager.ConfirmedGone(s.created[2].UID, s.now) }, "broken"},
		"the watch deletes it": {func(s *fixture) { s.manager.RemoveMember(s.created[2].UID, s.now) }, "broken"},
		"it is still unbound": {func(s *fixture) {
			s.created[2].ShortOfResources = true // So that the read shows something new.
			s.manager.Confirmed(s.created[2].Member, s.now)
		}, "binding"},
		"the last one is gone": {func(s *fixture) {
			s.done(2, true)
			s.manager.RemoveMember(s.created[3].UID, s.now)
			s.done(3, false)
		}, "broken"},
		"the last one is away": {func(s *fixture) {
			s.manager.CancelPermit(s.created[3].UID, s.held[0].permit, s.now)
			s.advance(testPatience)
			s.done(2, false)
		}, "broken"},
		"all members are gone": {func(s *fixture) { s.removeAll(); s.done(2, false) }, ""},
		"a bound one is gone": {func(s *fixture) {
			s.manager.RemoveMember(s.created[0].UID, s.now)
			s.done(2, true)
			s.done(3, true)
		}, "running"},
		"another process leads": {func(s *fixture) {
			s.manager.StopLeading(s.now)
			s.done(2, true)
			s.manager.StartLeading(s.now)
		}, "broken"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newBrokenScene(t, true)
			tc.then(s)
			if got := s.phase(); got != tc.want {
				t.Errorf("%q, want %q", got, tc.want)
			}
			if n := s.heldBinds(); n > 1 {
				t.Errorf("%d binds are held", n)
			}
		})
	}
}

// heldBinds counts the held binds of all runs.
func (s *fixture) heldBinds() (n int) {
	for _, g := range s.manager.groups {
		for _, r := range g.runs {
			if r.plan != nil {
				n += r.plan.count[memberArrived]
			}
		}
	}
	return n
}

// done ends a bind of newBrokenScene.
func (s *fixture) done(i int, ok bool) {
	s.ended(s.binds[i], ok)
	s.collectDecided()
}

func (s *fixture) removeAll() {
	for _, p := range s.created {
		s.manager.RemoveMember(p.UID, s.now)
	}
	s.collectDecided()
}

// TestEvictionIsTheLastResort: a broken group is evicted only after the patience, and after a live read of every missing
// member.
func TestEvictionIsTheLastResort(t *testing.T) {
	t.Run("all missing members are unbound", func(t *testing.T) {
		s := newBrokenScene(t, false)
		s.advance(testPatience - time.Second)
		s.wantNoEviction()
		if slices.Contains(s.reads, s.created[3].UID) {
			t.Error("more than a probe was read before the patience was over")
		}
		s.advance(7 * time.Second)
		if !slices.Contains(s.reads, s.created[2].UID) || !slices.Contains(s.reads, s.created[3].UID) {
			t.Errorf("read: %v", s.reads)
		}
		if got := fmt.Sprint(slices.Compact(slices.Sorted(slices.Values(s.evictions)))); got != "[uid-00001 uid-00002]" {
			t.Errorf("evicted: %v", got)
		}
		s.wantPhase(PhaseEvicting)
		for _, p := range s.created[:2] {
			p.Leaving = true
			s.report(p)
		}
		s.createMany(2, "job", 4, 16, "t")
		s.wantPhase(PhasePending)
	})
	t.Run("every second read is answered: patience doesn't count", func(t *testing.T) {
		s := newBrokenScene(t, false)
		answer, n := s.answer, 0
		s.answer = func(uid gpu.PodUID) {
			if n++; n%2 == 0 {
				answer(uid)
			}
		}
		s.advance(time.Hour)
		s.wantNoEviction()
	})
	t.Run("every second read is answered, after different times", func(t *testing.T) {
		s := newBrokenScene(t, false)
		answer, n := s.answer, 0
		s.answer = func(uid gpu.PodUID) {
			if n++; n%4 == 2 { // The first answer of two takes longer.
				s.now = s.now.Add(200 * time.Millisecond)
				answer(uid)
				s.now = s.now.Add(-200 * time.Millisecond)
			} else if n%4 == 0 {
				answer(uid)
			}
		}
		s.advance(time.Hour)
		s.wantNoEviction()
	})
	t.Run("four of five reads are answered: patience counts", func(t *testing.T) {
		s := newBrokenScene(t, false)
		answer, n := s.answer, 0
		s.answer = func(uid gpu.PodUID) {
			if n++; n%5 != 0 {
				answer(uid)
			}
		}
		s.advance(2*testPatience + queue.Retry)
		if len(s.evictions) == 0 {
			t.Error("no eviction")
		}
	})
	t.Run("one of the missing members can't be read", func(t *testing.T) {
		s := newBrokenScene(t, false)
		answer := s.answer
		s.answer = func(uid gpu.PodUID) {
			if uid != s.created[3].UID {
				answer(uid)
			}
		}
		s.advance(time.Hour)
		s.wantNoEviction()
		s.answer = answer
		s.advance(10 * time.Second)
		s.wantPhase(PhaseEvicting)
	})
	t.Run("a missing member names another size: that of the bound ones counts", func(t *testing.T) {
		s := newBrokenScene(t, false)
		s.created[3].Size++
		s.report(s.created[3])
		if got := s.filter(s.created[3]); got.Reason.Words != "invalid group: the members disagree on the group's size: pod-00001 says 4, pod-00004 says 5" {
			t.Errorf("filter answers %v", got.FilterResult)
		}
		s.advance(testPatience + 7*time.Second)
		s.wantPhase(PhaseEvicting)
	})
	t.Run("a pod of another size doesn't stand for a missing member", func(t *testing.T) {
		s := newBrokenScene(t, false)
		s.delete(s.created[3])
		s.create("job", 5, 16, "t")
		s.tryAll()
		s.advance(testPatience / 2)
		s.tryAll()
		s.bindGranted()
		s.advance(testPatience)
		s.wantPhase(PhaseEvicting)
	})
	t.Run("the bound members disagree on the size: it is unknown how many are missing", func(t *testing.T) {
		s := newBrokenScene(t, false)
		odd := s.created[1]
		odd.Size++
		s.report(odd)
		s.advance(time.Hour)
		s.wantNoEviction()
		odd.Size--
		s.report(odd)
		s.advance(testPatience + 7*time.Second)
		s.wantPhase(PhaseEvicting)
	})
	t.Run("the watch shows during the evictions that it is whole", func(t *testing.T) {
		s := newBrokenScene(t, false)
		s.advance(testPatience + 10*time.Second)
		n := len(s.evictions)
		for _, p := range s.created[2:] {
			p.Node = "n1"
			s.report(p)
		}
		s.advance(time.Hour)
		s.wantPhase(PhaseRunning)
		if len(s.evictions) > n {
			t.Error("the evictions went on")
		}
	})
	t.Run("the bound members are deleted before the last answer", func(t *testing.T) {
		s := newBrokenScene(t, false)
		answer, last := s.answer, s.created[3]
		s.answer = func(uid gpu.PodUID) {
			if uid != last.UID {
				answer(uid)
			}
		}
		s.advance(2 * testPatience)
		s.delete(s.created[0])
		s.delete(s.created[1])
		answer(last.UID)
		s.wantPhase(PhaseIncomplete)
	})
	t.Run("the next attempt is broken too: its patience begins again", func(t *testing.T) {
		s := newBrokenScene(t, false)
		s.advance(testPatience + 7*time.Second)
		s.wantPhase(PhaseEvicting)
		s.delete(s.created[0])
		s.delete(s.created[1])
		s.createMany(2, "job", 4, 16, "t")
		s.existing()
		s.tryAll()
		if len(s.granted) != 3 {
			t.Fatalf("%d binds are granted, want 3", len(s.granted))
		}
		for i, bind := range s.granted {
			s.bind(bind, i > 0)
		}
		s.evictions = nil
		s.advance(testPatience - time.Second)
		s.wantNoEviction()
	})
}

package gang

import (
	"fmt"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// fits reports whether a pod would fit some node now.
func (s *fixture) fits(pod gpu.Pod) (fits bool) {
	_, fits = s.ledger.FirstFit(pod, s.nodes)
	return fits
}

// TestSlowArrival: a group of which one more member arrives in each hold keeps its places for about twice the patience at most.
func TestSlowArrival(t *testing.T) {
	s := newFixture(t)
	s.createMany(8, "job", 8, 16, "t")
	start := s.now
	s.manager.filterAll(s.created[0].UID, s.nodes, s.now)
	for hold := 1; s.manager.Phases()[PhasePlanned] == 1 && hold < 8; hold++ {
		for _, p := range s.created[:hold] {
			for node := ""; !s.inBind(p) && node == ""; { // A late member is rejected once more.
				if result := s.manager.filterAll(p.UID, s.nodes, s.now); len(result.Nodes) > 0 {
					node = result.Nodes[0]
					permit := s.manager.RequestPermit(p.UID, node, s.now)
					if permit.Rejection != nil {
						t.Fatal(permit.Rejection)
					}
					s.held = append(s.held, bindCall{p, node, permit})
				}
			}
		}
		s.advance(testHold + 100*time.Millisecond)
	}
	if took := s.now.Sub(start); s.failures["timed_out"] < 3 || s.manager.Phases()[PhasePending] != 1 || took > 2*testPatience+testHold {
		t.Errorf("after %v: %v, %v", took, s.manager.Phases(), s.failures)
	}
}

// failPlans lets n plans of the first pod's group fail, since no member arrives, and returns the pause after each.
func (s *fixture) failPlans(n int) (pauses []time.Duration) {
	for range n {
		for s.manager.Phases()[PhasePlanned] == 0 {
			s.manager.filterAll(s.created[0].UID, s.nodes, s.now)
			s.advance(100 * time.Millisecond)
		}
		for s.manager.Phases()[PhasePlanned] == 1 {
			s.advance(100 * time.Millisecond)
		}
		from := s.now
		for reason := reasons.GroupPaused; reason == reasons.GroupPaused || reason == reasons.GroupBehindFailed; s.advance(100 * time.Millisecond) {
			reason = s.manager.filterAll(s.created[0].UID, s.nodes, s.now).Reason
		}
		pauses = append(pauses, s.now.Sub(from).Round(time.Second))
	}
	return pauses
}

// TestPause: the pause after a failed plan doubles up to ten minutes.
func TestPause(t *testing.T) {
	s := newFixture(t)
	s.createMany(4, "job", 4, 16, "t")
	if got, want := fmt.Sprint(s.failPlans(11)), "[2s 4s 8s 16s 32s 1m4s 2m8s 4m16s 8m32s 17m4s 20m0s]"; got != want {
		t.Errorf("pauses %v, want %v", got, want)
	}
	key := s.created[0].Gang
	shape := s.manager.Startable(key, s.now).Shape
	if failures, _ := s.manager.Failures.CountOf(queue.Profile{Namespace: key.Namespace, ShapeKey: shape}); failures != 11 {
		t.Errorf("%d failures of the group's shape", failures)
	}
}

// TestPauseIsOfShape: which changes end the pause of a group.
func TestPauseIsOfShape(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(s *fixture)
		ends   bool
	}{
		"the number is edited": {func(s *fixture) {
			for _, p := range s.created {
				p.Size = 3
				s.report(p)
			}
		}, true},
		"a member asks for another number of cards": {func(s *fixture) { s.created[1].Cards = 2; s.report(s.created[1]) }, true},
		"a member is replaced": {func(s *fixture) {
			s.delete(s.created[3])
			s.create("job", 4, 16, "t")
		}, false},
		"its controller makes all pods again": {func(s *fixture) {
			for _, p := range s.created[:4] {
				s.delete(p)
			}
			s.createMany(4, "job", 4, 16, "t")
			s.existing()
		}, false},
		"a run with another name starts": {func(s *fixture) {
			for _, p := range s.created[:4] {
				s.delete(p)
			}
			s.createMany(4, "next", 4, 16, "t")
			s.existing()
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.createMany(4, "job", 4, 16, "t")
			s.failPlans(3)
			s.manager.filterAll(s.created[0].UID, s.nodes, s.now)
			for s.manager.Phases()[PhasePlanned] == 1 {
				s.advance(100 * time.Millisecond)
			}
			s.manager.Failures.Arrived(queue.Profile{Namespace: "default", Size: queue.Size{Memory: 64, Cards: 8}}) // Another group of the namespace runs.
			if reason := s.manager.filterAll(s.created[0].UID, s.nodes, s.now).Reason; reason != reasons.GroupPaused {
				t.Fatalf("not paused: %v", reason)
			}
			tc.change(s)
			if reason := s.manager.filterAll(s.created[0].UID, s.nodes, s.now).Reason; (reason == reasons.GroupPaused) == tc.ends {
				t.Errorf("%v", reason)
			}
		})
	}
}

// TestFailedGroupGoesBehind: a group whose plan failed lets one of equal priority go first.
func TestFailedGroupGoesBehind(t *testing.T) {
	s := newFixture(t)
	s.createMany(8, "first", 8, 16, "t")
	s.namespace = "other"
	s.createMany(8, "second", 8, 16, "t")
	s.manager.filterAll("uid-00001", s.nodes, s.now)
	if node, _, _ := s.ledger.Lookup("uid-00001"); node == "" {
		t.Fatal("the older group has no plan")
	}
	s.advance(testPatience + 2*time.Second)
	s.manager.filterAll("uid-00001", s.nodes, s.now)
	if node, _, _ := s.ledger.Lookup("uid-00001"); node == "" {
		t.Fatal("without a rival that has candidate nodes, the older group has no plan after its pause")
	}
	s.manager.filterAll("uid-00009", s.nodes, s.now)
	s.advance(time.Second)
	if node, _, _ := s.ledger.Lookup("uid-00009"); node == "" {
		t.Error("the group that never failed has no plan")
	}
}

// TestFailedGroupEntersAgain: a group whose plan failed goes before groups of equal priority that were created after that.
func TestFailedGroupEntersAgain(t *testing.T) {
	s := newFixture(t)
	s.createMany(8, "failed", 8, 16, "t")
	s.manager.filterAll("uid-00001", s.nodes, s.now)
	s.advance(testPatience + 2*time.Second)
	s.namespace = "other"
	s.createMany(8, "later", 8, 16, "t")
	if first := s.manager.unfinished()[0].key.Name; first != "failed" {
		t.Errorf("%s goes first", first)
	}
}

// TestStopEndsTurn: the end of a term ends the turn of a group, for which others of a namespace with failures wait.
func TestStopEndsTurn(t *testing.T) {
	s := newFixture(t)
	profile := func(name string) queue.Profile {
		return queue.Profile{Namespace: "default", ID: name, ShapeKey: name, Size: queue.Size{Memory: 128, Cards: 8}}
	}
	s.manager.Failures.Failed(profile("failed"), s.now, s.now)
	s.advance(5 * time.Second)
	s.create("job", 1, 16, "t")
	s.manager.filterAll(s.created[0].UID, s.nodes, s.now)
	waits := func() bool {
		until, _ := s.manager.Failures.PauseUntil(profile("other"), false, s.now)
		return until.After(s.now)
	}
	if !waits() {
		t.Fatal("another group doesn't wait for the turn")
	}
	if s.manager.StopLeading(s.now); waits() {
		t.Error("another group still waits")
	}
}

// TestReservationNeedsAnOffer: a group gets no awaited reservation if kube-scheduler never offered nodes for its
// members, and names no lack of resources: their scheduler or their volumes may not exist.
func TestReservationNeedsAnOffer(t *testing.T) {
	s := newFixture(t)
	s.reserve()
	s.createMany(8, "evil", 8, 16, "t")
	for range 60 {
		s.advance(time.Minute)
		if !s.fits(gpu.Pod{UID: "single", Request: 1}) {
			t.Fatal("a single pod fits no node of an idle cluster")
		}
	}
	if s.reservations > 0 {
		t.Errorf("%d reservations", s.reservations)
	}
	for _, p := range s.created {
		p.ShortOfResources = true
		s.report(p)
	}
	if s.advance(10 * time.Second); s.reservations != 1 {
		t.Error("no reservation for a group of which kube-scheduler says that it lacks memory")
	}
}

// TestDisplace: a single pod takes the places of groups of lower priority that are not bound yet: the last ones in the
// order, and no more than needed.
func TestDisplace(t *testing.T) {
	s := newFixture(t)
	for i, priority := range []int32{5, 1, 3} {
		s.createMany(2, fmt.Sprint("g", i), 2, 16, "t")
		for _, p := range s.created[2*i:] {
			p.Priority = priority
			s.report(p)
		}
		s.manager.filterAll(s.created[2*i].UID, s.nodes, s.now)
	}
	s.createMany(2, "", 0, 16, "")
	for _, p := range s.created[6:] {
		s.bindSingle(p)
	}
	has := func(i int) bool { _, _, ok := s.ledger.Lookup(s.created[i].UID); return ok }
	for _, step := range []struct {
		what          string
		pod           gpu.Pod
		want          bool
		planned       [3]bool
		takesTheCards bool
	}{
		{"too low a priority", gpu.Pod{UID: "a", Request: 16, Priority: 1}, false, [3]bool{true, true, true}, false},
		{"larger than a card", gpu.Pod{UID: "b", Request: 17, Priority: 9}, false, [3]bool{true, true, true}, false},
		{"one group is enough", gpu.Pod{UID: "c", Request: 16, Priority: 9}, true, [3]bool{true, false, true}, true},
		{"the next one", gpu.Pod{UID: "d", Request: 16, Priority: 4}, true, [3]bool{true, false, false}, true},
		{"no group of lower priority is left", gpu.Pod{UID: "e", Request: 16, Priority: 4}, false, [3]bool{true, false, false}, false},
	} {
		if _, got := s.manager.Displace(step.pod, s.nodes, s.now); got != step.want {
			t.Errorf("%s: %t, want %t", step.what, got, step.want)
		}
		if got := [3]bool{has(0), has(2), has(4)}; got != step.planned {
			t.Errorf("%s: plans %v, want %v", step.what, got, step.planned)
		}
		if _, _, placed := s.ledger.Lookup(step.pod.UID); placed != step.want {
			t.Errorf("%s: the pod has a place: %t", step.what, placed)
		}
		if step.takesTheCards { // The pod has one of them.
			s.bindSingle(s.create("", 0, 16, ""))
		}
	}
	if s.failures["gave_way"] != 2 {
		t.Errorf("%v", s.failures)
	}
}

// TestPlaceIsCheckedAtPermit: what happens to a planned place before the bind call arrives.
func TestPlaceIsCheckedAtPermit(t *testing.T) {
	shrink := func(memory gpu.Memory, cards ...int) ledger.NodeSpec {
		spec := ledger.NodeSpec{Unit: gpu.GiB}
		for _, i := range cards {
			spec.Cards = append(spec.Cards, gpu.Card{Index: i, Memory: memory})
		}
		return spec
	}
	for name, tc := range map[string]struct {
		change func(s *fixture)
		// lost is true if the plan ends.
		lost bool
	}{
		"nothing": {func(*fixture) {}, false},
		"all cards of all nodes are gone": {func(s *fixture) {
			for _, name := range s.nodes {
				s.ledger.SetNode(name, shrink(16))
			}
		}, true},
		"its card is gone, and the node has another one": {func(s *fixture) {
			node, a, _ := s.ledger.Lookup(s.created[0].UID)
			s.ledger.SetNode(node, shrink(16, 1-a.Placement[0].Card))
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			s.create("job", 1, 16, "t")
			result := s.manager.filterAll(s.created[0].UID, s.nodes, s.now)
			tc.change(s)
			permit := s.manager.RequestPermit(s.created[0].UID, result.Nodes[0], s.now)
			<-permit.Decided
			if tc.lost {
				if permit.Rejection == nil || *permit.Rejection != reasons.GroupPlaceLost || s.manager.Phases()[PhasePending] != 1 {
					t.Errorf("%v, %v", permit.Rejection, s.manager.Phases())
				}
				return
			}
			if permit.Rejection != nil || !permit.MarkWhole || permit.Run != string(s.created[0].UID) {
				t.Errorf("rejection %v, completes %t, run %q", permit.Rejection, permit.MarkWhole, permit.Run)
			}
		})
	}
}

// TestNodeLost: a group loses memory with a node, and kube-scheduler makes no further call for the member there, whose only node it was. A hold that
// ends because of that is no failure of the group.
func TestNodeLost(t *testing.T) {
	for _, held := range []bool{true, false} {
		s := newFixture(t)
		a, b := s.create("job", 2, 16, "a"), s.create("job", 2, 16, "b")
		s.manager.filterAll(a.UID, []string{"n0"}, s.now)
		s.manager.filterAll(b.UID, []string{"n1"}, s.now)
		if held {
			s.arrive(a, "n0")
		}
		s.ledger.DeleteNode("n1")
		s.advance(testPatience + time.Second)
		if got := fmt.Sprint(s.failures); got != "map[place_lost:1]" {
			t.Errorf("held %t: %v", held, got)
		}
		if held && s.manager.Failures.HasFailuresIn("default") { // Otherwise it had memory for the patience.
			t.Error("the group has failed")
		}
	}
}

// TestDisplacedAgainAndAgain: a group whose members never arrive keeps little memory from others of its priority, also if pods of higher
// priority end each of its plans before it fails.
func TestDisplacedAgainAndAgain(t *testing.T) {
	s := newFixture(t)
	s.createMany(8, "job", 8, 16, "t")
	important := gpu.Pod{UID: "important", Request: 16, Priority: 1}
	kept := 0
	for second := range 4 * 3600 {
		s.manager.filterAll(s.created[0].UID, s.nodes, s.now)
		s.advance(time.Second)
		if s.manager.Phases()[PhasePlanned] == 1 && second >= 3600 {
			kept++
		}
		if second%5 == 4 {
			s.manager.Displace(important, s.nodes, s.now)
			s.ledger.Release(important.UID)
		}
	}
	if kept == 0 || kept > 3*3600/15 {
		t.Errorf("all memory is kept from others for %d s of three hours", kept)
	}
}

// TestResultOfAnEarlierBind: the result of a bind that began before the plan doesn't decide about a member whose bind is still held.
func TestResultOfAnEarlierBind(t *testing.T) {
	s := newFixture(t)
	s.createMany(3, "job", 3, 16, "t")
	s.filterMembers(0)
	s.arriveMembers(0, 1, 2)
	last := s.held[0]
	s.manager.NotBound(last.pod.UID, s.now)
	s.bindGranted()
	s.collectDecided()
	s.bindGranted()
	if got := s.phase(); got != "running" {
		t.Errorf("the run is %s, want it running", got)
	}
}

// TestDisplaceElsewhere: a pod that takes the places of groups ends no plan that has none on the pod's candidate nodes.
func TestDisplaceElsewhere(t *testing.T) {
	s := newFixture(t)
	s.createMany(2, "first", 2, 16, "t")
	s.createMany(2, "last", 2, 16, "t")
	s.filterMembers(0, 2)
	node, _, _ := s.ledger.Lookup(s.created[0].UID)
	if got, _ := s.manager.Displace(gpu.Pod{UID: "important", Request: 16, Priority: 1}, []string{node}, s.now); got != node {
		t.Fatalf("the pod gets a place on %q, want %s", got, node)
	}
	if s.failures["gave_way"] != 1 {
		t.Errorf("%d plans gave way, want 1", s.failures["gave_way"])
	}
}

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
	"github.com/gpushare/gpushare/test/check"
)

// recorder records for which groups memory was asked, by their first members.
type recorder struct{ asked []string }

// newFullManager returns a Manager whose groups find no room on the node n.
func newFullManager(t *testing.T) (*Manager, *recorder) {
	full := &recorder{}
	mgr := newManagerWith(t, func(q ledger.ResourceQuery) bool {
		full.asked = append(full.asked, string(q.Pods[0]))
		return false
	})
	mgr.Ledger.SetNode("n", ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: 1 << 20}}})
	mgr.StartLeading(begin)
	return mgr, full
}

// addGroup adds the members of a group, and offers nodes to each.
func (mgr *Manager) addGroup(name string, age, size int, edits ...memberEdit) {
	for i := range size {
		m := newMember(fmt.Sprint(name, "-", i), -age, append(edits, sized(size))...)
		m.Gang.Name = name
		mgr.SetMember(m, begin)
		mgr.offer(mgr.members[m.UID].run, mgr.members[m.UID], mgr.intern(1, []string{"n"}), begin)
	}
}

// TestLikeGroups: if there is no room for a group, none that is like it and goes after it is tried at the same time.
func TestLikeGroups(t *testing.T) {
	mgr, full := newFullManager(t)
	mgr.addGroup("second", 2, 2)
	mgr.addGroup("third", 1, 2)
	mgr.addGroup("first", 3, 2)
	mgr.addGroup("larger", 1, 3)
	mgr.addGroup("with-other-volumes", 1, 2, func(m *Member) { m.Template, m.Shape = "volumes of "+m.Name, "t" })
	mgr.addGroup("with-other-resources", 1, 2, func(m *Member) { m.Template = "u" })
	mgr.addGroup("important", 1, 2, func(m *Member) { m.Priority = 1 })
	mgr.Tick(begin.Add(time.Second))
	slices.Sort(full.asked)
	check.Equal(t, "the result", []string{"first-0", "important-0", "larger-0", "with-other-resources-0"}, full.asked)
	full.asked = nil
	now := begin.Add(time.Minute)
	clear(mgr.noRoomFor)
	for _, name := range []string{"second", "third", "first"} {
		mgr.tryPlan(mgr.groups[Key{Name: name}].runs[0], now)
	}
	check.Equal(t, "one that goes before has more groups that give way", []string{"second-0", "first-0"}, full.asked)
}

// TestNoRoomInFormerTerm: that a group found no room in a former term doesn't keep it from a try in the next one.
func TestNoRoomInFormerTerm(t *testing.T) {
	mgr, full := newFullManager(t)
	mgr.SetMember(newMember("a", 0, sized(1)), begin)
	for range 2 {
		mgr.filterAll("a", []string{"n"}, begin)
		mgr.StopLeading(begin)
		mgr.StartLeading(begin)
	}
	check.Equal(t, "the result", []string{"a", "a"}, full.asked)
}

// TestWorkPerTick: a Tick tries a limited number of members. All groups have their turn, although memory is freed before each
// Tick and the groups that go first could be tried again.
func TestWorkPerTick(t *testing.T) {
	const groups, size = 30, 500
	mgr, full := newFullManager(t)
	for g := range groups {
		mgr.addGroup(fmt.Sprintf("g%02d", g), groups-g, size, func(m *Member) { m.Request = gpu.Memory(g + 1) })
	}
	now, tried := begin, map[string]bool{}
	for range 30 {
		now = now.Add(300 * time.Millisecond)
		mgr.MemoryFreed()
		full.asked = nil
		mgr.Tick(now)
		if n := len(full.asked) * size; n > maxWork+2*size {
			t.Errorf("%d members were tried at once", n)
		}
		for _, name := range full.asked {
			tried[name] = true
		}
	}
	if len(tried) != groups {
		t.Errorf("%d of %d groups were tried", len(tried), groups)
	}
}

// TestOppositeOrder: the largest pod, placed first, takes the node with the CPUs that the other one needs.
func TestOppositeOrder(t *testing.T) {
	free, needs := map[string]int{"n1": 2, "n2": 1}, map[gpu.PodUID]int{"large": 1, "small": 2}
	mgr := newManagerWith(t, func(q ledger.ResourceQuery) bool {
		sum := 0
		for _, uid := range slices.Concat(q.Pods, q.Ahead) {
			sum += needs[uid]
		}
		return sum <= free[q.Node]
	})
	for _, node := range []string{"n1", "n2"} {
		mgr.Ledger.SetNode(node, ledger.NodeSpec{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: 16}}})
	}
	mgr.StartLeading(begin)
	mgr.SetMember(newMember("small", 0, sized(2)), begin)
	mgr.SetMember(newMember("large", 0, sized(2), func(m *Member) { m.Request = 16 }), begin)
	for uid, want := range map[gpu.PodUID]string{"large": "n2", "small": "n1"} {
		if got := mgr.filterAll(uid, []string{"n1", "n2"}, begin); !slices.Equal(got.Nodes, []string{want}) {
			t.Errorf("%s: %v, want %s: %s", uid, got.Nodes, want, got.Reason.Text())
		}
	}
}

// TestGivesWayIfNeeded: of two groups that go after it, a group ends the plan of the one whose nodes it can use, not that of the last one.
func TestGivesWayIfNeeded(t *testing.T) {
	s := newFixture(t)
	plan := func(name, node string, priority int32) *pod {
		for range 2 {
			s.add(Member{Pod: gpu.Pod{Request: 16, Priority: priority}, Gang: Key{Namespace: s.namespace, Name: name}, Size: 2, Template: name})
		}
		m := s.created[len(s.created)-1]
		s.manager.filterAll(m.UID, []string{node}, s.now)
		s.now = s.now.Add(time.Second)
		return m
	}
	second, last, first := plan("second", "n1", 0), plan("last", "n0", 0), plan("first", "n1", 1)
	for want, m := range map[string]*pod{"n1": first, "": second, "n0": last} {
		if node, _, _ := s.ledger.Lookup(m.UID); node != want {
			t.Errorf("%s has a place on %q, want %q", m.Gang.Name, node, want)
		}
	}
	check.Equal(t, "failures", map[string]int{"gave_way": 1}, s.failures)
}

// TestNoRoomForManyMembers: while a group has no room, a filter call for one of its members doesn't look at all others.
func TestNoRoomForManyMembers(t *testing.T) {
	const members = 500
	c, looks := newBenchCluster(1), 0
	c.manager.AwaitsTurn = func(gpu.Pod) bool {
		looks++
		return false
	}
	c.load(1, members, false)
	for i := range members {
		if got := c.manager.filterAll(c.member(0, i, members, false).UID, c.nodes, c.now); got.Reason != reasons.GroupNoRoom {
			t.Fatal(got)
		}
	}
	if looks > 2*members {
		t.Errorf("%d looks at members in %d calls", looks, members)
	}
}

// TestLikeGroupsElsewhere: a group without room doesn't keep one like it from other nodes, which its volumes allow.
func TestLikeGroupsElsewhere(t *testing.T) {
	s := newFixture(t)
	volumes := func(m *Member) { m.Template, m.Shape = "volumes of "+m.Gang.Name, "t" }
	for i, name := range []string{"first", "second", "third"} {
		s.now = s.now.Add(time.Duration(i) * time.Second)
		for range 2 {
			s.add(Member{Pod: gpu.Pod{Request: 16}, Gang: Key{Namespace: s.namespace, Name: name}, Size: 2}, volumes)
		}
	}
	for _, node := range []string{"n0", "n2"} {
		s.ledger.SetBound(node, gpu.Pod{UID: gpu.PodUID("on " + node), Request: 16}, gpu.On(0, 16), begin)
	}
	for i := 0; s.now.Before(begin.Add(30 * time.Second)); i++ {
		s.manager.filterAll(s.created[0].UID, []string{"n0"}, s.now)
		s.manager.filterAll(s.created[2].UID, []string{"n1"}, s.now)
		s.manager.filterAll(s.created[4].UID, []string{"n2"}, s.now)
		s.advance(time.Second)
	}
	if got := s.manager.Phases(); got[PhasePending] != 2 || got[PhasePlanned] != 1 {
		t.Errorf("%v; want the second planned, and the others pending", got)
	}
	if items := s.manager.Waiting(s.now); len(items) != 2 || items[0].RoomKey == items[1].RoomKey {
		t.Errorf("%d items, want two that aren't alike", len(items))
	}
}

// TestAlikeBehindStuck: of two groups that are alike, kube-scheduler makes no calls for the first any more, because of its volumes. So the second has
// the awaited reservation. Once the cards are free it is planned after the first one's patience, before its own reservation is late.
func TestAlikeBehindStuck(t *testing.T) {
	s := newFixture(t)
	s.reserve()
	blocker := s.ledger
	for i := range 8 {
		blocker.SetBound(s.nodes[i/2], gpu.Pod{UID: gpu.PodUID(fmt.Sprint("old", i)), Request: 16}, gpu.On(i%2, 16), s.now)
	}
	s.advance(time.Second)
	s.createMany(8, "first", 8, 16, "t")
	s.advance(time.Second)
	s.createMany(8, "second", 8, 16, "t")
	first, second := s.existing()[:8], s.existing()[8:]
	for _, p := range first {
		s.filter(p)
	}
	s.advance(2 * time.Second)
	for i := range 8 { // Others take their place.
		blocker.Remove(gpu.PodUID(fmt.Sprint("old", i)))
		blocker.SetBound(s.nodes[i/2], gpu.Pod{UID: gpu.PodUID(fmt.Sprint("new", i)), Request: 16}, gpu.On(i%2, 16), s.now)
	}
	for range 100 {
		for _, p := range second {
			s.filter(p)
		}
		s.advance(queue.KubeSchedulerRetries / 50)
	}
	for _, p := range second {
		s.filter(p)
	}
	s.advance(time.Second)
	if got := fmt.Sprint(s.ledger.AwaitedItems()); got != "[group default/second]" {
		t.Fatal(got)
	}
	for i := range 8 {
		blocker.Remove(gpu.PodUID(fmt.Sprint("new", i)))
	}
	for range 90 {
		for _, p := range second {
			s.filter(p)
		}
		if node, _, _ := s.ledger.Lookup(second[0].UID); node != "" {
			return
		}
		s.advance(500 * time.Millisecond)
	}
	t.Errorf("not planned: %v, failures %v", s.manager.Phases(), s.failures)
}

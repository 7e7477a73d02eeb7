package gang

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/test/check"
)

// native is a fixture with native groups.
type native struct{ *fixture }

func newNative(t *testing.T) *native {
	s := &native{newFixture(t)}
	s.manager.ServePodGroups()
	return s
}

func nativeKey(name string) Key { return Key{Namespace: "default", Name: name, Native: true} }

func (s *native) setSize(group string, size int) {
	s.manager.SetPodGroup(nativeKey(group), PodGroup{Size: size}, s.now)
}

// add creates n pods of a native group.
func (s *native) add(group string, n int, memory gpu.Memory, template string) (pods []*pod) {
	for range n {
		pods = append(pods, s.fixture.add(Member{Pod: gpu.Pod{Request: memory}, Template: template, Gang: nativeKey(group), PodGroup: group}))
	}
	return pods
}

// cycle makes the calls for the members of a group with minCount, as kube-scheduler does for PodGroups: the bind calls follow if enough
// members have a node. reject names pods for which kube-scheduler finds no node. It returns the reasons of the Manager.
func (s *native) cycle(group string, minCount int, reject ...gpu.PodUID) (reasons []string) {
	scheduled, left := 0, []*pod{}
	for _, p := range s.existing() {
		switch {
		case p.Gang != nativeKey(group):
		case p.Node != "" || s.inBind(p):
			scheduled++
		default:
			left = append(left, p)
		}
	}
	var binds []bindCall
	for i, p := range left {
		if scheduled+len(binds)+len(left)-i < minCount {
			return reasons
		}
		if slices.Contains(reject, p.UID) {
			continue
		}
		if result := s.filter(p); result.node != "" {
			binds = append(binds, bindCall{pod: p, node: result.node})
		} else {
			reasons = append(reasons, result.Reason.Text())
		}
	}
	if scheduled+len(binds) < minCount {
		return reasons
	}
	for _, bind := range binds {
		s.arrive(bind.pod, bind.node)
	}
	s.collectDecided()
	return reasons
}

// bound counts the bound pods by group.
func (s *native) bound() map[string]int {
	out := map[string]int{}
	for _, p := range s.pods {
		if p.Node != "" {
			out[p.Gang.Name]++
		}
	}
	return out
}

// reserved returns the memory that is assumed and not bound.
func (s *native) reserved() (sum gpu.Memory) {
	for uid, p := range s.pods {
		if _, _, assumed := s.ledger.Lookup(uid); assumed && p.Node == "" {
			sum += p.Request
		}
	}
	return sum
}

func (s *native) want(what string, bound map[string]int, reserved gpu.Memory) {
	s.Helper()
	if got := s.bound(); !maps.Equal(got, bound) || s.reserved() != reserved {
		s.Errorf("%s: bound %v and %v reserved, want %v and %v", what, got, s.reserved(), bound, reserved)
	}
}

func (s *native) wantReason(reasons []string, want string) {
	s.Helper()
	if len(reasons) == 0 || !strings.Contains(reasons[0], want) {
		s.Errorf("reasons %q, want %q", reasons, want)
	}
}

// TestNativeAllOrNothing: a group that fits by the sums of the nodes and not by their cards is bound not at all, and as soon as a card is
// free it is bound whole. Members that were more than needed follow as single pods.
func TestNativeAllOrNothing(t *testing.T) {
	s := newNative(t)
	s.add("train", 10, 10, "t") // The sums take twelve, the cards eight.
	s.setSize("train", 9)
	s.wantReason(s.cycle("train", 9), reasons.GroupNoRoom.Text())
	s.want("it fits by sums", map[string]int{}, 0)
	s.addNode("n4")
	s.advance(time.Second)
	s.wantReason(s.cycle("train", 9), reasons.GroupSurplus.Text())
	s.bindGranted()
	s.want("a node was added", map[string]int{"train": 9}, 0)
	s.cycle("train", 9)
	s.bindGranted()
	s.want("the surplus member", map[string]int{"train": 10}, 0)
}

// TestNativePlanEnds: if no bind follows the filter calls, since kube-scheduler finds no node for another member, the plan ends
// ledger.TentativeLifetime after the last call, and at the patience at the latest. Then the group pauses.
func TestNativePlanEnds(t *testing.T) {
	s := newNative(t)
	pods := s.add("train", 4, 16, "t")
	s.setSize("train", 4)
	s.advance(time.Second)
	fail := func() { s.cycle("train", 4, pods[3].UID) }
	fail()
	s.want("planned", map[string]int{}, 64)
	for range 3 {
		s.advance(ledger.TentativeLifetime - 200*time.Millisecond)
		fail()
	}
	s.want("the cycle is repeated", map[string]int{}, 64)
	s.advance(ledger.TentativeLifetime + 100*time.Millisecond)
	s.want("no call for a while", map[string]int{}, 0)
	s.wantReason(s.cycle("train", 4), reasons.GroupPaused.Text())
	s.advance(2 * time.Second)
	s.cycle("train", 4)
	s.bindGranted()
	s.want("after the pause", map[string]int{"train": 4}, 0)

	more := s.add("other", 4, 16, "t")
	s.setSize("other", 4)
	for range int(testPatience / time.Second) {
		s.cycle("other", 4, more[3].UID)
		s.want("it fails again and again", map[string]int{"train": 4}, 64)
		s.advance(time.Second)
	}
	s.want("its patience is over", map[string]int{"train": 4}, 0)
}

// TestNativeGroupsCompete: two groups of which one fits never get a half each, whatever the order of their cycles.
func TestNativeGroupsCompete(t *testing.T) {
	for seed := range uint64(20) {
		s, random := newNative(t), rand.New(rand.NewPCG(seed, 3))
		for _, group := range []string{"a", "b"} {
			s.setSize(group, 5)
			s.add(group, 5, 16, "t")
		}
		for range 200 {
			s.cycle([]string{"a", "b"}[random.IntN(2)], 5)
			s.bindGranted()
			s.advance(time.Duration(random.IntN(1500)) * time.Millisecond)
			for _, n := range s.bound() {
				if n != 5 {
					t.Fatalf("bound: %v", s.bound())
				}
			}
		}
		if got := s.bound(); len(got) != 1 {
			t.Errorf("bound: %v", got)
		}
	}
}

// TestNativePlanBetweenCycles: memory that comes free is reserved in the next cycle, not before. A group behind one that still waits for
// its cycle can be planned.
func TestNativePlanBetweenCycles(t *testing.T) {
	s := newNative(t)
	s.createMany(8, "", 0, 12, "") // One on each card: each node has 8 free by its sum, each card 4.
	s.tryAll()
	for _, group := range []string{"first", "second"} {
		s.setSize(group, 1)
		s.add(group, 1, 8, "t")
		s.wantReason(s.cycle(group, 1), reasons.GroupNoRoom.Text())
	}
	bound := s.bound()
	s.delete(s.existing()[0])
	bound[""]--
	s.advance(5 * time.Second)
	s.want("no cycle", bound, 0)
	s.cycle("second", 1)
	s.want("the second one's cycle comes first", bound, 8)
}

// TestNativeCallGivenUp: if kube-scheduler gives up the bind call of the only member that has arrived, the plan ends soon.
func TestNativeCallGivenUp(t *testing.T) {
	s := newNative(t)
	s.setSize("train", 2)
	pods := s.add("train", 2, 16, "t")
	s.cycle("train", 2, pods[1].UID)
	node, _, _ := s.ledger.Lookup(pods[0].UID)
	permit := s.manager.RequestPermit(pods[0].UID, node, s.now)
	s.advance(5 * time.Second)
	s.want("one call is held", map[string]int{}, 32)
	if !s.manager.CancelPermit(pods[0].UID, permit, s.now) {
		t.Error("it isn't cancelled")
	}
	s.advance(ledger.TentativeLifetime)
	s.want("after that", map[string]int{}, 0)
}

// TestNativeWholeCards: kube-scheduler alone knows where members fit that request whole cards, so they need no nodes by their specs.
func TestNativeWholeCards(t *testing.T) {
	s := newNative(t)
	s.manager.EligibleNodes = func(gpu.PodUID) []string { return nil }
	s.setSize("whole", 2)
	pods := append(s.add("whole", 1, 0, "leader"), s.add("whole", 1, 0, "worker")...)
	for _, p := range pods {
		if got := s.manager.filterAll(p.UID, s.nodes, s.now); len(got.Nodes) != len(s.nodes) {
			t.Errorf("%+v", got)
		}
	}
}

// TestNativeTemplates: the first call makes the plan for members of other templates too, on the nodes that their specs allow. If
// kube-scheduler doesn't offer such a node, the member moves.
func TestNativeTemplates(t *testing.T) {
	s := newNative(t)
	s.setSize("mixed", 3)
	s.add("mixed", 1, 16, "leader")
	workers := s.add("mixed", 2, 16, "worker")
	asked := 0
	s.manager.EligibleNodes = func(gpu.PodUID) []string {
		asked++
		return nil
	}
	s.wantReason(s.cycle("mixed", 3), reasons.GroupNoRoom.Text())
	s.manager.filterAll(workers[0].UID, s.nodes[:0], s.now.Add(10*time.Millisecond)) // A later call of the same cycle.
	s.want("no node for workers", map[string]int{}, 0)
	if asked != 1 {
		t.Errorf("the nodes of all members were looked for %d times in one cycle", asked)
	}
	s.manager.EligibleNodes = func(gpu.PodUID) []string { return []string{"n1", "n2"} }
	s.advance(time.Second)
	leader := s.existing()[0]
	s.manager.TakeEffects()
	s.manager.filterAll(leader.UID, s.nodes, s.now)
	if s.manager.TakeEffects().Requeue {
		t.Error("pods are requeued, though their filter calls follow")
	}
	s.want("planned by one call", map[string]int{}, 48)
	for _, p := range workers {
		if node, _, _ := s.ledger.Lookup(p.UID); node != "n1" && node != "n2" {
			t.Errorf("worker on %s", node)
		}
		if got := s.manager.filterAll(p.UID, []string{"n3"}, s.now).Nodes; !slices.Equal(got, []string{"n3"}) {
			t.Errorf("nodes %v", got)
		}
	}
	if got := s.manager.members[leader.UID].run.offers["worker"].nodes.names; !slices.Equal(got, []string{"n1", "n2"}) {
		t.Errorf("a call that saw the members before as bound counts as an offer: %v", got)
	}
}

// TestNativeBindFails: the member whose bind fails follows alone, since kube-scheduler counts the bound members.
func TestNativeBindFails(t *testing.T) {
	s := newNative(t)
	s.setSize("train", 3)
	s.add("train", 3, 16, "t")
	s.cycle("train", 3)
	s.bind(s.granted[0], true)
	s.granted = s.granted[1:]
	s.bindGranted()
	s.want("one bind failed", map[string]int{"train": 1}, 0)
	s.advance(2 * time.Second)
	s.cycle("train", 3)
	s.bindGranted()
	s.want("the others follow", map[string]int{"train": 3}, 0)
}

// TestPodGroups: what a PodGroup says takes effect whenever it comes. Contradictions are rejected with a reason.
func TestPodGroups(t *testing.T) {
	s := newNative(t)
	filter := func(p *pod) FilterResult {
		s.advance(time.Second)
		return s.manager.filterAll(p.UID, s.nodes, s.now)
	}
	want := func(p *pod, text string) {
		s.Helper()
		if got := filter(p).Reason.Text(); !strings.Contains(got, text) {
			t.Errorf("reason %q, want %q", got, text)
		}
	}
	p := s.add("late", 3, 16, "t")
	want(p[0], "PodGroup late doesn't exist")
	if events := s.manager.TakeEffects().Events; len(events) > 0 {
		t.Errorf("the watch reported a pod before its PodGroup: %v", events)
	}
	if reports, _ := s.manager.Reports(); reports[0].Problem != "pod-00001: PodGroup late doesn't exist" {
		t.Errorf("reported: %q", reports[0].Problem)
	}
	s.manager.SetPodGroup(nativeKey("late"), PodGroup{Problem: "PodGroup late: wrong"}, s.now)
	want(p[0], "invalid group: PodGroup late: wrong")
	if events := s.manager.TakeEffects().Events; len(events) != 1 || events[0].Reason != EventInvalid {
		t.Errorf("Events %v", events)
	}
	s.setSize("late", 4)
	want(p[0], "3 of 4 members exist")
	s.setSize("late", 3)
	if got := filter(p[0]); len(got.Nodes) != 1 {
		t.Errorf("not planned: %+v", got)
	}
	s.setSize("late", 2)
	s.want("the size changed while it was planned", map[string]int{}, 0)
	s.cycle("late", 2)
	s.manager.RemovePodGroup(nativeKey("late"), s.now) // Too late: its binds are granted.
	s.bindGranted()
	s.want("it is bound", map[string]int{"late": 2}, 0)
	s.setSize("late", 3)
	p[2].Controller = "other"
	s.report(p[2])
	if !filter(p[2]).Alone {
		t.Error("the PodGroup of a running group grew, and a pod of another controller isn't placed alone")
	}
	for _, old := range p[:2] {
		s.delete(old)
	}
	want(p[2], "1 of 3 members exist")

	both := s.add("both", 1, 16, "t")[0]
	s.setSize("both", 1)
	both.Gang.Native = false
	s.report(both)
	want(both, "only one of both can count")

	s.create("late", 1, 16, "t") // By annotations, with the same name.
	twin := s.existing()[len(s.pods)-1]
	if got := filter(twin); got.Alone || len(got.Nodes) != 1 {
		t.Errorf("a group of the other kind with the same name: %+v", got)
	}
}

// TestPodGroupOf: the PodGroup of a pod is known if it exists, also if annotations name another group.
func TestPodGroupOf(t *testing.T) {
	s := newNative(t)
	p := s.add("g", 1, 16, "t")[0]
	if podGroup, known := s.manager.PodGroupOf(p.UID); known {
		t.Errorf("known before it exists: %+v", podGroup)
	}
	want := PodGroup{Size: 1, Priority: 7, Together: true}
	s.manager.SetPodGroup(nativeKey("g"), want, s.now)
	single := s.create("", 0, 16, "")
	for _, native := range []bool{true, false} {
		p.Gang.Native = native
		s.report(p)
		if podGroup, known := s.manager.PodGroupOf(p.UID); !known || podGroup != want {
			t.Errorf("%+v, known: %t", podGroup, known)
		}
	}
	if podGroup, known := s.manager.PodGroupOf(single.UID); known {
		t.Errorf("of a pod without one: %+v", podGroup)
	}
}

// TestPodGroupBasic: pods of a PodGroup with the policy basic are placed like single pods, whatever controls them and whenever the PodGroup
// appears.
func TestPodGroupBasic(t *testing.T) {
	s := newNative(t)
	early := s.add("basic", 3, 16, "t")
	early[1].Controller = "job"
	s.report(early[1])
	s.manager.SetPodGroup(nativeKey("basic"), PodGroup{Alone: true}, s.now)
	pods := append(early, s.add("basic", 2, 16, "t")...)
	bound := s.add("basic", 1, 16, "t")[0]
	bound.Node, bound.Run = "n0", "x"
	if _, err := s.ledger.Reserve("n0", bound.Pod, placement.Binpack, s.now); err != nil {
		t.Fatal(err)
	}
	s.report(bound)
	for restarted := range 2 {
		for _, p := range pods {
			if !s.manager.filterAll(p.UID, s.nodes, s.now).Alone {
				t.Errorf("%s isn't placed alone (restarts: %d)", p.Name, restarted)
			}
		}
		alone := s.manager.Startable(nativeKey("basic"), s.now).Alone
		if len(alone) != len(pods) {
			t.Errorf("%d can be started alone", len(alone))
		}
		if surplus := s.manager.Surplus(nativeKey("basic")); len(surplus) != 1 {
			t.Errorf("%v are surplus, not the bound one", surplus)
		}
		s.manager.StopLeading(s.now)
		s.manager.StartLeading(s.now)
	}
}

// TestNativeControllers: a PodGroup of which a pod always runs can have pods of any number of controllers, one after the other. Its run
// remembers only those that it has pods of.
func TestNativeControllers(t *testing.T) {
	s := newNative(t)
	s.addNode("n")
	s.setSize("service", 1)
	s.add("service", 1, 1, "t")
	s.cycle("service", 1)
	s.bindGranted()
	for i := range 20 {
		p := s.add("service", 1, 1, "t")[0]
		p.Controller = fmt.Sprint("job-", i)
		s.report(p)
		s.cycle("service", 1)
		s.bindGranted()
		if p.Node == "" {
			t.Fatalf("%s is not bound", p.Name)
		}
		s.delete(p)
	}
	for _, r := range s.manager.groups[nativeKey("service")].runs {
		if len(r.controllers) > 1 {
			t.Errorf("a run remembers %d controllers", len(r.controllers))
		}
	}
}

// TestNativeBelowMinCount: of a PodGroup that ran, one pod has succeeded and another one is replaced. kube-scheduler doesn't try the replacement, as long
// as fewer pods than minCount haven't ended.
func TestNativeBelowMinCount(t *testing.T) {
	s := newNative(t)
	s.setSize("g", 3)
	s.add("g", 3, 8, "a")
	s.cycle("g", 3)
	s.bindGranted()
	s.want("the group runs", map[string]int{"g": 3}, 0)
	ended, deleted := s.created[0], s.created[1]
	ended.Ended, ended.Succeeded = true, true
	s.report(ended)
	s.delete(deleted)
	replacement := s.add("g", 1, 8, "a")[0]
	want := reasons.GroupIncomplete(2, 3).Unfinished()
	status, waits := s.manager.Status(replacement.UID)
	check.Equal(t, "the reason", want, status.Reason)
	check.Equal(t, "waits", true, waits)
	reports, _ := s.manager.Reports()
	check.Equal(t, "the reason of the run", want, reports[0].Reason)

	s.fixture.add(Member{Cardless: true, Gang: nativeKey("g"), PodGroup: "g"}) // kube-scheduler counts it.
	if status, waits := s.manager.Status(replacement.UID); waits {
		t.Errorf("with enough pods it waits: %v", status.Reason)
	}
}

package gang

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// TestStatus: what a member waits for, and since when.
func TestStatus(t *testing.T) {
	mgr := newManager(t)
	mgr.StartLeading(begin)
	at := begin
	status := func(uid gpu.PodUID) string {
		s, waits := mgr.Status(uid)
		if !waits {
			return "doesn't wait"
		}
		if s.Group.Name != "job" {
			t.Errorf("group %v", s.Group)
		}
		since := ""
		if !s.Since.IsZero() {
			since = " since " + s.Since.Sub(begin).String()
		}
		return mgr.members[uid].run.phase.String() + since + ", " + s.Reason.Text()
	}
	want := func(uid gpu.PodUID, want string) {
		t.Helper()
		if got := status(uid); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	want("a", "doesn't wait")
	mgr.SetMember(newMember("a", 0, sized(2)), at)
	want("a", "incomplete since 0s, gang: 1 of 2 members exist")
	mgr.SetMember(newMember("b", 0, sized(2), func(m *Member) { m.GatedOtherwise = true }), at)
	want("a", "incomplete since 0s, gang: 1 of 2 members exist; not counted: 1 with scheduling gates or an invalid group, such as b")
	mgr.SetMember(newMember("b", 60, sized(3)), at)
	want("a", "incomplete, gang: invalid group: the members disagree on the group's size: a says 2, b says 3")
	at = at.Add(time.Minute)
	mgr.SetMember(newMember("b", 60, sized(2)), at) // So the group waits since its last member was created, whichever process has led since when.
	want("a", "pending since 1m0s, gang: kube-scheduler hasn't tried all other members yet")
	mgr.AwaitsTurn = func(pod gpu.Pod) bool { return pod.UID == "b" }
	want("a", "pending since 1m0s, gang: not all members have had their turn by fair sharing")
	mgr.filterAll("a", []string{"n"}, at)
	want("a", "pending since 1m0s, gang: not all members have had their turn by fair sharing")
	mgr.AwaitsTurn = never
	at = at.Add(time.Minute)
	mgr.filterAll("a", []string{"n"}, at)
	want("b", "pending since 1m0s, gang: there is no room for all members at once")
	mgr.SetMember(newMember("c", 90, sized(2), func(m *Member) { m.Problem, m.Size = "the size is no number", 0 }), at)
	want("c", "pending since 1m0s, gang: invalid group: the size is no number")
	at = at.Add(time.Minute)
	mgr.SetMember(newMember("a", 0, sized(2), inRun("", 9)), at)
	want("a", "doesn't wait")
	want("b", "broken since 1m0s, gang: only 1 of 2 members are bound, there is no room for all members at once")
	if member, whole := mgr.Membership("a"); !member || whole {
		t.Errorf("a bound member of a broken group: member %t, whole %t", member, whole)
	}
	mgr.SetMember(newMember("b", 60, sized(2), inRun("", 9)), at)
	want("b", "doesn't wait")
	if member, whole := mgr.Membership("a"); !member || !whole {
		t.Errorf("a member of a running group: member %t, whole %t", member, whole)
	}
	if member, _ := mgr.Membership("unknown"); member {
		t.Error("a pod without a group is a member")
	}
	mgr.StopLeading(at)
	mgr.SetMember(newMember("d", 0), at)
	want("d", "doesn't wait")
	launcher := newMember("launcher", 0, func(m *Member) { m.Cardless = true })
	mgr.SetMember(launcher, at)
	for uid, want := range map[gpu.PodUID]bool{"d": false, "not seen yet": false, "launcher": true} {
		if _, whole := mgr.Membership(uid); whole != want {
			t.Errorf("%s is placed like a single pod: %t", uid, whole)
		}
	}
}

// TestSchedulers: a group that waits for filter calls names the schedulers of its members if they are several. One may not call the extender.
func TestSchedulers(t *testing.T) {
	for name, test := range map[string]struct {
		schedulers []string
		tried      bool
		want       string
	}{
		"one scheduler":                {[]string{"a", "a"}, true, ""},
		"one that doesn't call":        {[]string{"a", "b"}, true, ": they name the schedulers a and b"},
		"none has called":              {[]string{"b", "a"}, false, ": they name the schedulers a and b"},
		"more than three":              {[]string{"a", "d", "c", "2b"}, true, ": they name the schedulers 2b and a and c"},
		"all but one of one scheduler": {[]string{"a", "a", "a", "b"}, true, ": they name the schedulers a and b"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFixture(t)
			for _, scheduler := range test.schedulers {
				s.add(Member{Pod: gpu.Pod{Request: 1}, Gang: Key{Namespace: "default", Name: "job"}, Size: len(test.schedulers), Template: scheduler, Scheduler: scheduler})
			}
			want := reasons.GroupAwaitsOthers
			want.Words += test.want
			first := s.created[0].UID
			if test.tried {
				s.created[len(s.created)-1].Template = "untried"
				s.report(s.created[len(s.created)-1])
				if got := s.manager.filterAll(first, s.nodes, s.now).Reason; got != want {
					t.Errorf("filter answers %v", got)
				}
			}
			s.advance(time.Second)
			status, _ := s.manager.Status(first)
			if reports, _ := s.manager.Reports(); status.Reason != want || reports[0].Reason != want {
				t.Errorf("status %v, report %v", status.Reason, reports[0].Reason)
			}
		})
	}
}

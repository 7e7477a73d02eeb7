package gang

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

type memberEdit func(*Member)

// newMember returns a pending pod of a group of four, created after the given seconds.
func newMember(name string, seconds int, edits ...memberEdit) Member {
	m := Member{Pod: gpu.Pod{UID: gpu.PodUID(name), Name: name, Request: 8}, Size: 4, Template: "t", Controller: "job", Gang: Key{Name: "job"}}
	m.Created = begin.Add(time.Duration(seconds) * time.Second)
	for _, edit := range edits {
		edit(&m)
	}
	if m.Shape == "" {
		m.Shape = m.Template
	}
	return m
}

// inRun makes the pod bound after the given seconds; a negative number stands for an unknown time.
func inRun(run string, seconds int) memberEdit {
	return func(m *Member) {
		m.Node, m.Run = "n", run
		if seconds >= 0 {
			m.BoundAt = begin.Add(time.Duration(seconds) * time.Second)
		}
	}
}

func marked(m *Member)    { m.MarkedWhole = true }
func done(m *Member)      { m.Ended, m.Succeeded = true, true }
func failed(m *Member)    { m.Ended = true }
func leaving(m *Member)   { m.Leaving = true }
func ofNextJob(m *Member) { m.Controller = "next" }
func bare(m *Member)      { m.Controller = "" }
func sized(n int) memberEdit {
	return func(m *Member) { m.Size = n }
}

// runs describes all runs: phase, identity and members, in the order of the members' names.
func (mgr *Manager) runs() (out []string) {
	for _, g := range mgr.groups {
		for _, r := range g.runs {
			var names []string
			for uid := range r.members {
				names = append(names, string(uid))
			}
			slices.Sort(names)
			out = append(out, fmt.Sprintf("%v %q: %s", r.phase, r.id, strings.Join(names, " ")))
		}
	}
	slices.Sort(out)
	return out
}

// TestPartition: a new leader divides the pods of a group into runs, by what the API server knows of them.
func TestPartition(t *testing.T) {
	for name, tc := range map[string]struct {
		members []Member
		want    []string
	}{
		"too few": {
			[]Member{newMember("a", 0)},
			[]string{`incomplete "": a`},
		},
		"enough": {
			[]Member{newMember("a", 0), newMember("b", 0), newMember("c", 0), newMember("d", 0, bare)},
			[]string{`pending "": a b c d`},
		},
		"all bound, without a mark: the last bind's answer was lost": {
			[]Member{newMember("a", 0, inRun("x", 5)), newMember("b", 0, inRun("x", 5)), newMember("c", 0, inRun("x", 5)), newMember("d", 0, inRun("x", 5))},
			[]string{`running "x": a b c d`},
		},
		"bound by an earlier version": {
			[]Member{newMember("a", 0, inRun("", 5)), newMember("b", 0, inRun("", 5)), newMember("c", 0, inRun("", 5)), newMember("d", 0, inRun("", 5))},
			[]string{`running "": a b c d`},
		},
		"two of four bound, when the old leader ended": {
			[]Member{newMember("a", 0, inRun("x", 5)), newMember("b", 0, inRun("x", 5)), newMember("c", 0), newMember("d", 0)},
			[]string{`broken "x": a b c d`},
		},
		"the time of the binds is unknown": {
			[]Member{newMember("a", 0, inRun("x", -1)), newMember("c", 9), newMember("d", 9)},
			[]string{`broken "x": a c d`},
		},
		"one replaces a member of a run that is marked": {
			[]Member{newMember("a", 0, inRun("x", 5), marked), newMember("b", 0, inRun("x", 5)), newMember("e", 9)},
			[]string{`running "x": a b e`},
		},
		"the one with the mark has ended": {
			[]Member{newMember("a", 0, inRun("x", 5), marked, failed), newMember("b", 0, inRun("x", 5)), newMember("e", 0)},
			[]string{`running "x": a b e`},
		},
		"without a mark, too few of those that existed at the last bind are left": {
			[]Member{newMember("a", 0, inRun("x", 5)), newMember("b", 0, inRun("x", 5)), newMember("c", 0), newMember("d", 9)},
			[]string{`running "x": a b c d`},
		},
		"created in the second of the last bind": {
			[]Member{newMember("a", 0, inRun("x", 5)), newMember("b", 0, inRun("x", 5)), newMember("c", 5), newMember("d", 5)},
			[]string{`broken "x": a b c d`},
		},
		"nothing is known to be missing": {
			[]Member{newMember("a", 0, inRun("x", -1))},
			[]string{`running "x": a`},
		},
		"two have succeeded, and a controller creates the next two": {
			[]Member{newMember("a", 0, inRun("x", 5), done), newMember("b", 0, inRun("x", 5), done, marked), newMember("c", 9), newMember("d", 9)},
			[]string{`running "x": a b c d`},
		},
		"the next job's pods exist before the last old one has ended": {
			[]Member{
				newMember("old", 0, inRun("x", 5), leaving), newMember("old2", 0, inRun("x", 5)), newMember("a", 9, ofNextJob), newMember("b", 9, ofNextJob),
				newMember("c", 9, ofNextJob), newMember("d", 9, ofNextJob),
			},
			[]string{`pending "": a b c d`, `running "x": old old2`},
		},
		"of the next run, two are bound": {
			[]Member{
				newMember("old", 0, inRun("x", 5)), newMember("a", 9, ofNextJob, inRun("y", 12)), newMember("b", 9, ofNextJob, inRun("y", 12)),
				newMember("c", 9, ofNextJob), newMember("d", 9, ofNextJob),
			},
			[]string{`broken "y": a b c d`, `running "x": old`},
		},
		"an old job's pods without a controller have ended": {
			[]Member{newMember("old", 0, inRun("x", 5), done, bare), newMember("a", 9, bare), newMember("b", 9, bare)},
			[]string{`incomplete "": a b`, `running "x": old`},
		},
		"one is gone after the binds, and another job of the same group name has all of its pods": {
			[]Member{
				newMember("a", 0, sized(3), inRun("x", 5)), newMember("b", 0, sized(3), inRun("x", 5)), newMember("c", 0, sized(3), ofNextJob),
				newMember("d", 0, sized(3), ofNextJob), newMember("e", 0, sized(3), ofNextJob),
			},
			[]string{`pending "": c d e`, `running "x": a b`},
		},
		"two are gone after the binds, and the job's new pods name another number": {
			[]Member{newMember("a", 0, inRun("x", 5)), newMember("b", 0, inRun("x", 5)), newMember("c", 0, sized(2)), newMember("d", 0, sized(2))},
			[]string{`running "x": a b c d`},
		},
		"it isn't known when the members were bound, and the pod that waits can't complete the run": {
			[]Member{newMember("a", 0, inRun("x", -1), sized(3)), newMember("b", 0, inRun("x", -1), sized(3)), newMember("c", 0, sized(4))},
			[]string{`running "x": a b c`},
		},
		"a pod of another number replaces one that is gone after the binds, and a surplus one still waits": {
			[]Member{
				newMember("a", 0, sized(3), inRun("x", 5)), newMember("b", 0, sized(3), inRun("x", 5)), newMember("c", 0, sized(3)), newMember("d", 9, sized(4)),
			},
			[]string{`running "x": a b c d`},
		},
		"bound members disagree on the size": {
			[]Member{newMember("a", 0, inRun("x", 5), sized(2)), newMember("b", 0, inRun("x", 5)), newMember("c", 0)},
			[]string{`broken "x": a b c`},
		},
	} {
		t.Run(name, func(t *testing.T) {
			mgr := newManager(t)
			for _, m := range tc.members {
				mgr.SetMember(m, begin)
			}
			mgr.StartLeading(begin.Add(time.Minute))
			check.Equal(t, "the result", tc.want, mgr.runs())
			permute(tc.members, func(members []Member) {
				if got := listedWhileLeading(t, members, tc.want); !slices.Equal(got, tc.want) {
					t.Errorf("listed as %v: %v, want %v", names(members), got, tc.want)
				}
			})
		})
	}
}

// TestPartitionCompletedNames: an earlier version of the extender bound pods of two replicas as one group, in runs that were whole. They stay in
// these runs, so no member is evicted, although a label completes the names now.
func TestPartitionCompletedNames(t *testing.T) {
	in := func(group string) memberEdit {
		return func(m *Member) { m.Gang.Name, m.Kind, m.Controller = group, LeaderWorkerSet, group }
	}
	mgr := newManager(t)
	for _, m := range []Member{
		newMember("a", 0, in("serve/0"), inRun("x", 5)), newMember("b", 0, in("serve/0"), inRun("x", 5)),
		newMember("c", 0, in("serve/0"), inRun("x", 5), marked), newMember("d", 0, in("serve/1"), inRun("x", 5)),
		newMember("e", 0, in("serve/1")), newMember("f", 0, in("serve/1")), newMember("g", 0, in("serve/1")),
	} {
		mgr.SetMember(m, begin)
	}
	mgr.StartLeading(begin.Add(time.Minute))
	check.Equal(t, "the result", []string{`running "x": a b c`, `running "x": d e f g`}, mgr.runs())
}

// listedWhileLeading returns the runs after a process that leads gets to know the pods one by one, because its watch was behind
// and begins again with a list. If these are not the wanted ones, the patience passes while reads show nothing new.
func listedWhileLeading(t *testing.T, members []Member, want []string) []string {
	mgr := newManager(t)
	mgr.OnFailure = Keep
	now := begin.Add(time.Minute)
	mgr.StartLeading(now)
	for _, m := range members {
		mgr.SetMember(m, now)
	}
	for end := now.Add(mgr.Patience + 10*time.Second); now.Before(end) && !slices.Equal(mgr.runs(), want); now = now.Add(time.Second) {
		mgr.Tick(now)
		for _, pod := range mgr.TakeEffects().Verify {
			mgr.Confirmed(mgr.members[pod.UID].Member, now)
		}
	}
	return mgr.runs()
}

// permute calls with each order of the members.
func permute(members []Member, with func([]Member)) {
	var rest func(n int)
	rest = func(n int) {
		if n == len(members) {
			with(members)
		}
		for i := n; i < len(members); i++ {
			members[n], members[i] = members[i], members[n]
			rest(n + 1)
			members[n], members[i] = members[i], members[n]
		}
	}
	rest(0)
}

func names(members []Member) (out []string) {
	for i := range members {
		out = append(out, members[i].Name)
	}
	return out
}

// TestMembership: while a process leads, members join and leave runs one by one.
func TestMembership(t *testing.T) {
	whole := []Member{
		newMember("a", 0, inRun("x", 5)), newMember("b", 0, inRun("x", 5)), newMember("c", 0, inRun("x", 5)), newMember("d", 0, inRun("x", 5), marked),
	}
	for name, tc := range map[string]struct {
		set    []Member
		remove []gpu.PodUID
		want   []string
	}{
		"a failed member's replacement joins alone": {
			[]Member{newMember("a", 0, inRun("x", 5), failed), newMember("e", 9)}, []gpu.PodUID{"a"},
			[]string{`running "x": b c d e`},
		},
		"the pods of another controller start the next run": {
			[]Member{newMember("e", 9, ofNextJob), newMember("f", 9, ofNextJob)}, nil,
			[]string{`incomplete "": e f`, `running "x": a b c d`},
		},
		"the next run starts while the old one still ends": {
			[]Member{
				newMember("b", 0, inRun("x", 5), leaving), newMember("e", 9, ofNextJob), newMember("f", 9, ofNextJob), newMember("g", 9, ofNextJob),
				newMember("h", 9, ofNextJob),
			}, []gpu.PodUID{"a", "c"},
			[]string{`pending "": e f g h`, `running "x": b d`},
		},
		"a replacement joins the next run if the old one ends before it is bound": {
			[]Member{
				newMember("e", 9), newMember("a", 0, inRun("x", 5), failed), newMember("b", 0, inRun("x", 5), failed), newMember("c", 0, inRun("x", 5), failed),
				newMember("d", 0, inRun("x", 5), failed),
			}, []gpu.PodUID{"b"},
			[]string{`incomplete "": e`, `running "x": a c d`},
		},
		"whether the run of an unknown bound pod misses members is decided later": {
			[]Member{newMember("e", 9, inRun("z", 9))}, nil,
			[]string{`broken "z": e`, `running "x": a b c d`},
		},
		"all are gone": {nil, []gpu.PodUID{"a", "b", "c", "d"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			mgr := newManager(t)
			for _, m := range whole {
				mgr.SetMember(m, begin)
			}
			mgr.StartLeading(begin)
			for _, m := range tc.set {
				mgr.SetMember(m, begin)
			}
			for _, uid := range tc.remove {
				mgr.RemoveMember(uid, begin)
			}
			check.Equal(t, "the result", tc.want, mgr.runs())
		})
	}
}

// TestMembershipBeforeLeading: what a new leader evicts before it knows the runs is no member of a group.
func TestMembershipBeforeLeading(t *testing.T) {
	mgr := newManager(t)
	mgr.SetMember(newMember("a", 0, inRun("x", 5)), begin)
	if member, whole := mgr.Membership("a"); !member || whole {
		t.Errorf("member %t, of a whole group %t; want a member of one that isn't known to be whole", member, whole)
	}
	if member, _ := mgr.Membership("other"); member {
		t.Error("a pod without a group is a member")
	}
}

// TestOldRead: a live read that is older than the watch doesn't undo what the watch has reported.
func TestOldRead(t *testing.T) {
	mgr := newManager(t)
	mgr.StartLeading(begin)
	old := newMember("a", 0, sized(3), func(m *Member) { m.GatedOtherwise = true })
	mgr.SetMember(old, begin)
	mgr.SetMember(newMember("a", 0, sized(2)), begin)
	mgr.SetMember(newMember("b", 0, sized(2)), begin)
	mgr.Confirmed(old, begin)
	if got := mgr.Phases()[PhasePending]; got != 1 {
		t.Errorf("phases %v, want pending", mgr.Phases())
	}
}

// TestNoRequeueForMessage: kube-scheduler's messages on the pods change with each attempt. They don't make it try again.
func TestNoRequeueForMessage(t *testing.T) {
	mgr := newManager(t)
	mgr.StartLeading(begin)
	mgr.SetMember(newMember("a", 0, sized(2), func(m *Member) { m.Template = "x" }), begin)
	mgr.SetMember(newMember("b", 0, sized(2), func(m *Member) { m.Template = "y" }), begin)
	mgr.filterAll("a", []string{"n"}, begin)
	mgr.TakeEffects()
	mgr.SetMember(newMember("b", 0, sized(2), func(m *Member) { m.Template, m.ShortOfResources = "y", true }), begin)
	if mgr.TakeEffects().Requeue {
		t.Error("requeued")
	}
}

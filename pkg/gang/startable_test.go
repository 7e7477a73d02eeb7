package gang

import (
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/test/check"
)

// TestSurplus: the members that were bound last are surplus, as many as there are beyond the number of the group.
func TestSurplus(t *testing.T) {
	in := func(n int, name string, seconds int, edits ...memberEdit) Member {
		return newMember(name, 0, append(edits, inRun("x", seconds), sized(n))...)
	}
	for name, tc := range map[string]struct {
		members []Member
		want    []gpu.PodUID
	}{
		"one member beyond the number":  {[]Member{in(2, "a", 5), in(2, "b", 9), in(2, "c", 5, marked)}, []gpu.PodUID{"b"}},
		"a number of 1":                 {[]Member{in(1, "a", 5, marked), in(1, "b", 6, marked), in(1, "c", 7, marked)}, []gpu.PodUID{"c", "b"}},
		"as many as the number":         {[]Member{in(2, "a", 5), in(2, "b", 5, marked)}, nil},
		"one that is leaving":           {[]Member{in(2, "a", 5), in(2, "b", 9, marked), in(2, "c", 5, leaving)}, nil},
		"one has finished":              {[]Member{in(2, "a", 5), in(2, "b", 9, marked), in(2, "c", 5, done)}, []gpu.PodUID{"b"}},
		"a part of the group is bound":  {[]Member{in(4, "a", 5), in(4, "b", 5), newMember("c", 0)}, nil},
		"members that name two numbers": {[]Member{in(1, "a", 5, marked), in(2, "b", 6, marked)}, []gpu.PodUID{"b"}},
	} {
		t.Run(name, func(t *testing.T) {
			mgr := newManager(t)
			for _, m := range tc.members {
				mgr.SetMember(m, begin)
			}
			mgr.StartLeading(begin)
			check.Equal(t, "the result", tc.want, mgr.Surplus(Key{Name: "job"}))
		})
	}
}

// TestSurplusOfPodGroup: pods that may only be disrupted together aren't surplus.
func TestSurplusOfPodGroup(t *testing.T) {
	key := Key{Name: "job", Native: true}
	ofPodGroup := func(m *Member) { m.Gang, m.PodGroup = key, key.Name }
	for together, want := range map[bool][]gpu.PodUID{false: {"b"}, true: nil} {
		mgr := newManager(t)
		mgr.ServePodGroups()
		mgr.SetPodGroup(key, PodGroup{Size: 1, Together: together}, begin)
		mgr.SetMember(newMember("a", 0, ofPodGroup, inRun("x", 5), marked), begin)
		mgr.SetMember(newMember("b", 0, ofPodGroup, inRun("x", 9), marked), begin)
		mgr.StartLeading(begin)
		check.Equal(t, "surplus members", want, mgr.Surplus(key))
	}
}

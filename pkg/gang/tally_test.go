package gang

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// recount counts members from scratch, in what a run reads of its tally.
func recount(members map[int]*member) map[string]any {
	counts, sizes, boundSizes := [categories]int{}, map[int]bool{}, map[int]bool{}
	active, priorities := map[string]bool{}, map[int32]bool{}
	var finished, marked int
	for _, m := range members {
		counts[m.counted]++
		if m.MarkedWhole {
			marked++
		}
		if m.counted != other && m.counted != succeeded && m.Size > 0 {
			sizes[m.Size] = true
			if m.counted == bound {
				boundSizes[m.Size] = true
			}
		}
		if m.counted == pending || m.counted == bound {
			active[m.Controller], priorities[m.Priority] = true, true
		}
	}
	for _, m := range members {
		if m.counted == succeeded && m.Controller != "" && active[m.Controller] {
			finished++
		}
	}
	size := 0
	if len(boundSizes) > 0 {
		sizes = boundSizes
	}
	for n := range sizes {
		size = n
	}
	if len(sizes) > 1 {
		size = 0
	}
	lowest, known := int32(0), false
	for p := range priorities {
		if !known || p < lowest {
			lowest, known = p, true
		}
	}
	return map[string]any{
		"counts": counts, "size": size, "finished": finished, "marked": marked, "priority": lowest,
		"whole": marked > 0 || size > 0 && counts[bound]+finished >= size,
	}
}

func (t *tally) summary() map[string]any {
	return map[string]any{
		"counts": t.counts, "size": t.size(), "finished": t.succeededCounted, "marked": t.marked, "priority": t.priority(), "whole": t.whole(),
	}
}

// memberOf decodes a member from two bytes.
func memberOf(a, b byte) *member {
	m := &member{Member: Member{
		Size: int(a>>4) % 3, Controller: []string{"", "x", "y"}[a%3], MarkedWhole: a&8 != 0,
	}}
	m.Priority = int32(b>>1) % 3
	switch b >> 4 {
	case 0, 1, 2, 3:
		m.Node = "n"
	case 4:
		m.Ended = true
	case 5, 6:
		m.Ended, m.Succeeded, m.Node = true, true, "n"
	case 7:
		m.Leaving = true
	case 8:
		m.GatedOtherwise = true
	}
	m.counted = m.category()
	return m
}

// FuzzTally adds, changes and removes members, and compares the counts with a recount.
func FuzzTally(f *testing.F) {
	f.Add([]byte{1, 0x11, 0x91, 2, 0x12, 0x52, 1, 0x21, 0x01, 0, 0, 0})
	f.Add([]byte("a job of three members, of which some succeed, one is replaced and one changes its mind"))
	for seed := range 50 {
		var ops []byte
		for i := range 600 {
			ops = append(ops, byte(seed*31+i*i*7+i>>3))
		}
		f.Add(ops)
	}
	f.Fuzz(func(t *testing.T, ops []byte) {
		tally, members := newTally(), map[int]*member{}
		for ; len(ops) >= 3; ops = ops[3:] {
			i := int(ops[0]) % 12
			if known := members[i]; known != nil {
				tally.add(known, -1)
				delete(members, i)
			}
			if ops[0] < 200 {
				members[i] = memberOf(ops[1], ops[2])
				tally.add(members[i], 1)
			}
			if diff := cmp.Diff(recount(members), tally.summary()); diff != "" {
				t.Fatalf("-recount +tally:\n%s", diff)
			}
		}
	})
}

// TestAccepts checks which controllers' pods join a run that is running.
func TestAccepts(t *testing.T) {
	runs, ended := Member{Node: "n"}, Member{Node: "n", Ended: true}
	done := Member{Node: "n", Ended: true, Succeeded: true}
	of := func(controller string, m Member) Member { m.Controller = controller; return m }
	for name, tc := range map[string]struct {
		members []Member
		accepts map[string]bool
	}{
		"a controller replaces its member while another one runs": {
			[]Member{of("job", runs), of("job", ended)}, map[string]bool{"job": true, "next": false, "": false},
		},
		"also if the other one belongs to another controller": {
			[]Member{of("workers", runs), of("leader", ended)}, map[string]bool{"workers": true, "leader": true},
		},
		"no member runs any more": {[]Member{of("job", ended)}, map[string]bool{"job": false}},
		"no member runs, but the controller's pods succeed one after the other": {
			[]Member{of("job", done), of("other", ended)}, map[string]bool{"job": true, "other": false},
		},
		"pods without a controller, while one of them runs": {[]Member{runs}, map[string]bool{"": true, "job": false}},
		"pods without a controller, afterwards":             {[]Member{ended, of("job", runs)}, map[string]bool{"": false, "job": true}},
	} {
		t.Run(name, func(t *testing.T) {
			tally := newTally()
			for _, m := range tc.members {
				member := &member{Member: m}
				member.counted = member.category()
				tally.add(member, 1)
			}
			for controller, want := range tc.accepts {
				if got := tally.accepts(controller); got != want {
					t.Errorf("a pod of %q: %t, want %t", controller, got, want)
				}
			}
		})
	}
}

package gang

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// recount counts members from scratch, in what a run reads of its tally.
func recount(members map[int]*member) map[string]any {
	counts, priorities := [categories]int{}, map[int32]bool{}
	var size, marked int
	for _, m := range members {
		counts[m.counted]++
		if m.MarkedWhole {
			marked++
		}
		if m.counted != other && m.counted != succeeded && m.Size > 0 {
			size = max(size, m.Size)
		}
		if m.counted == pending || m.counted == bound {
			priorities[m.Priority] = true
		}
	}
	lowest, known := int32(0), false
	for p := range priorities {
		if !known || p < lowest {
			lowest, known = p, true
		}
	}
	return map[string]any{
		"counts": counts, "size": size, "marked": marked, "priority": lowest,
		"whole": marked > 0 || size > 0 && counts[bound]+counts[succeeded] >= size,
	}
}

func (t *tally) summary() map[string]any {
	return map[string]any{
		"counts": t.counts, "size": t.size(), "marked": t.marked, "priority": t.priority(), "whole": t.whole(),
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

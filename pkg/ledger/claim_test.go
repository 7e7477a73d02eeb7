package ledger_test

import (
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

func TestClaim(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	var freed []string
	l, nodes := twoNodes(func(node string) { freed = append(freed, node) })
	// n1 is half full, n2 is full but for 4.
	for uid, node := range map[string]string{"a": "n1", "b": "n2", "c": "n2", "d": "n2"} {
		memory := gpu.Memory(16)
		if uid == "d" {
			continue
		}
		if uid == "c" {
			memory = 12
		}
		if _, err := l.Reserve(node, asking(uid, memory), placement.Binpack, at); err != nil {
			t.Fatal(err)
		}
		l.Commit(gpu.PodUID(uid))
	}
	finds := func(pod gpu.Pod) (fits []string) {
		l.Check(pod, nodes, func(name string, reason placement.Reason) {
			if reason == placement.Fits {
				fits = append(fits, name)
			}
		})
		return fits
	}
	if l.Claim(wants(nodes, 16, 16, 16, 16, 16), 0) {
		t.Error("five cards are claimed of four")
	}
	if got := finds(asking("x", 4)); !slices.Equal(got, nodes) {
		t.Errorf("after a claim that failed there is room on %v", got)
	}
	if !l.Claim(wants(nodes, 16, 16), 0) {
		t.Fatal("two cards can't be claimed")
	}
	important := asking("x", 4)
	important.Priority = 1
	for name, tc := range map[string]struct {
		pod  gpu.Pod
		want []string
	}{
		"others find it taken, and what comes free too": {asking("x", 4), nil},
		"a member doesn't":                   {asking("w0", 16), []string{"n1"}},
		"who is more important doesn't":      {important, nodes},
		"who has its place already keeps it": {asking("c", 12), []string{"n2"}},
	} {
		if got := finds(tc.pod); !slices.Equal(got, tc.want) {
			t.Errorf("%s: there is room on %v, want %v", name, got, tc.want)
		}
	}
	l.Drop("c")
	if got := finds(asking("x", 4)); got != nil {
		t.Errorf("what came free of a claimed card is given to others on %v", got)
	}
	if places, _ := l.ReserveTogether(wants(nodes, 16, 16), nil, binpack, at); len(places) != 2 {
		t.Errorf("the members find %v", places)
	}
	l.Release("w0")
	l.Release("w1")
	freed = nil
	l.Unclaim()
	l.Unclaim()
	slices.Sort(freed)
	if !slices.Equal(freed, nodes) {
		t.Errorf("when the claim ended, there was more room on %v", freed)
	}
	if got := finds(asking("x", 4)); !slices.Equal(got, nodes) {
		t.Errorf("after the claim there is room on %v", got)
	}
}

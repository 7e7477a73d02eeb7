package ledger_test

import (
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

func TestStarvationReservation(t *testing.T) {
	at := time.Unix(1_800_000_000, 0)
	var freed []string
	l, nodes := twoNodes(func(node string) { freed = append(freed, node) })
	// n1 has 16 of 32 allocated, n2 28 of 32.
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
		l.Confirm(gpu.PodUID(uid))
	}
	finds := func(pod gpu.Pod) (fits []string) {
		l.Check(pod, nodes, func(name string, reason placement.Reason) {
			if reason == placement.Fits {
				fits = append(fits, name)
			}
		})
		return fits
	}
	if l.ReserveForStarving(wants(nodes, 16, 16, 16, 16, 16), 0) {
		t.Error("five cards of four were reserved")
	}
	if got := finds(asking("x", 4)); !slices.Equal(got, nodes) {
		t.Errorf("after a failed reservation the pod fits %v", got)
	}
	if !l.ReserveForStarving(wants(nodes, 16, 16), 0) {
		t.Fatal("two cards can't be reserved")
	}
	important := asking("x", 4)
	important.Priority = 1
	for name, tc := range map[string]struct {
		pod  gpu.Pod
		want []string
	}{
		"the reserved memory is taken for other pods, freed memory too": {asking("x", 4), nil},
		"a member fits":                 {asking("w0", 16), []string{"n1"}},
		"a pod of higher priority fits": {important, nodes},
		"a pod keeps its allocation":    {asking("c", 12), []string{"n2"}},
	} {
		if got := finds(tc.pod); !slices.Equal(got, tc.want) {
			t.Errorf("%s: fits %v, want %v", name, got, tc.want)
		}
	}
	l.Remove("c")
	if got := finds(asking("x", 4)); got != nil {
		t.Errorf("freed memory of a reserved card is available to another pod on %v", got)
	}
	if places, _ := l.ReserveAll(wants(nodes, 16, 16), nil, binpack, at); len(places) != 2 {
		t.Errorf("reservations of the members: %v", places)
	}
	l.Release("w0")
	l.Release("w1")
	freed = nil
	l.EndStarvationReservation()
	l.EndStarvationReservation()
	slices.Sort(freed)
	if !slices.Equal(freed, nodes) {
		t.Errorf("freed at the end of the reservation: %v", freed)
	}
	if got := finds(asking("x", 4)); !slices.Equal(got, nodes) {
		t.Errorf("after the reservation the pod fits %v", got)
	}
}

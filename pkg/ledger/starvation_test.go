package ledger_test

import (
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

func TestStarvationReservation(t *testing.T) {
	f, nodes := newFixture(t, spec(16, 16), spec(16, 16)), []string{"n1", "n2"}
	// n1 has 16 of 32 allocated, n2 28 of 32.
	f.bind("n1", 0, pod("a", 16))
	f.bind("n2", 0, pod("b", 16))
	f.bind("n2", 1, pod("c", 12))
	finds := func(what string, pod gpu.Pod, want ...string) {
		t.Helper()
		var got []string
		f.Check(pod, nodes, func(name string, reason placement.Reason) {
			if reason == placement.Fits {
				got = append(got, name)
			}
		})
		expect(t, what, want, got)
	}
	expect(t, "five cards of four are reserved", false, f.ReserveForStarving(requests(nodes, 16, 16, 16, 16, 16), 0, "", nil))
	finds("after a failed reservation", pod("x", 4), nodes...)
	expect(t, "two cards are reserved", true, f.ReserveForStarving(requests(nodes, 16, 16), 0, "", nil))
	finds("the reserved memory counts as used for other pods", pod("x", 4))
	finds("a member", pod("w0", 16), "n1")
	finds("a pod of higher priority", pod("x", 4, 1), nodes...)
	finds("a pod keeps its allocation", pod("c", 12), "n2")
	f.Remove("c")
	finds("freed memory of a reserved card is reserved as well", pod("x", 4))
	places, _ := f.ReserveAll(requests(nodes, 16, 16), nil, binpack, nil, at)
	expect(t, "reservations of the members", 2, len(places))
	f.Release("w0")
	f.Release("w1")
	f.takeFreed()
	f.EndStarvationReservation()
	f.EndStarvationReservation()
	expect(t, "freed at the end", nodes, f.takeFreed())
	finds("after the end", pod("x", 4), nodes...)
}

package ledger_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Places are held on cards that are still in use.
func TestHold(t *testing.T) {
	const fits, full, reserved = reasons.Fits, reasons.Full, reasons.Reserved
	f := newFixture(t, spec(16), spec(16))
	f.bind("n1", 0, pod("victim", 8), pod("stays", 8))
	f.bind("n2", 0, pod("other", 8))
	held := []heldPlace{{"a", "n1", gpu.On(0, 4), 1}, {"b", "n1", gpu.On(0, 4), 1}, {"c", "n2", gpu.On(0, 4), 2}}
	f.hold(held, 5)
	expect(t, "a pod that has a held place", []reasons.Reason{full, fits}, f.check(pod("a", 4), "n1", "n2"))
	expect(t, "another pod", []reasons.Reason{full, fits}, f.check(pod("x", 4), "n1", "n2"))
	expect(t, "a larger pod", []reasons.Reason{full, full}, f.check(pod("x", 8), "n1", "n2"))
	f.Remove("victim")
	expect(t, "another pod when the victim is gone", []reasons.Reason{full, fits}, f.rank(binpack, pod("x", 4, 5), "n1", "n2"))
	expect(t, "one of higher priority", []reasons.Reason{fits, fits}, f.rank(binpack, pod("x", 4, 6), "n1", "n2"))
	if _, err := f.Reserve("n1", pod("x", 1), placement.Binpack, at); err == nil {
		t.Error("another pod gets a held place by Reserve")
	}
	places, _ := f.ReserveAll(requests([]string{"n1", "n2"}, 4, 4, 4), nil, binpack, at)
	expect(t, "others get places at once", 0, len(places))
	nodes := []string{"n1", "n2"}
	both := []ledger.Request{{Pod: pod("x", 4), Nodes: nodes}, {Pod: pod("a", 4), Nodes: nodes}}
	places, _ = f.ReserveAll(both, nil, binpack, at)
	expect(t, "in one step, each pod has its own view", []ledger.ChosenNode{{Node: "n2"}, {Node: "n1"}}, places)
	f.Release("x")
	f.Release("a")
	f.takeFreed()
	f.hold(held[1:], 5)
	expect(t, "freed by a smaller hold", []string{"n1"}, f.takeFreed())
	expect(t, "the smaller hold", []reasons.Reason{fits, fits}, f.check(pod("x", 4), "n1", "n2"))
	expect(t, "reserved beside the hold", true, f.await(requests([]string{"n2"}, 12), 1, longAgo))
	expect(t, "with an awaited reservation", []reasons.Reason{fits, reserved}, f.check(pod("x", 4), "n1", "n2"))
	f.End(ledger.Queued, testItem.ID)
	f.takeFreed()
	f.hold(nil, 5)
	expect(t, "freed at the end", []string{"n1", "n2"}, f.takeFreed())
	expect(t, "after the end", []reasons.Reason{fits, fits}, f.check(pod("x", 4), "n1", "n2"))
}

// Places stay held on a node that is removed and added again, and on one that is added later.
func TestHoldOfNewNode(t *testing.T) {
	f := newFixture(t, spec(16))
	f.hold([]heldPlace{{"a", "n1", gpu.On(0, 16), 1}, {"b", "n2", gpu.On(0, 16), 1}}, 5)
	f.DeleteNode("n1")
	f.SetNode("n1", spec(16))
	f.SetNode("n2", spec(16))
	expect(t, "another pod", []reasons.Reason{reasons.Full, reasons.Full}, f.check(pod("x", 1), "n1", "n2"))
	expect(t, "a pod that has a held place", []reasons.Reason{reasons.Fits, reasons.Fits}, f.check(pod("a", 16), "n1", "n2"))
	f.hold(nil, 5)
	expect(t, "after the end", []reasons.Reason{reasons.Fits, reasons.Fits}, f.check(pod("x", 16), "n1", "n2"))
}

// A pod for which a second reservation is made before the first has ended counts nowhere once both have.
func TestTwoHoldsOfOnePod(t *testing.T) {
	f := newFixture(t, spec(16), spec(16))
	for i, id := range []string{"first", "second"} {
		f.AddReservation(id, held([]heldPlace{{"a", fmt.Sprint("n", i+1), gpu.On(0, 16), 1}}, 5)[0])
	}
	f.End(ledger.Reclaimed, "first")
	expect(t, "pods on the node of the first", []gpu.PodUID(nil), f.ReservedOn("n1"))
	expect(t, "another pod", []reasons.Reason{reasons.Fits, reasons.Full}, f.check(pod("x", 1), "n1", "n2"))
	f.End(ledger.Reclaimed, "second")
	expect(t, "pods in the end", 0, len(f.ReservedOn("n1"))+len(f.ReservedOn("n2")))
}

// Two reservations of one pod on one node count there until both have ended.
func TestTwoHoldsOnOneNode(t *testing.T) {
	f := newFixture(t, spec(16))
	for _, id := range []string{"first", "second"} {
		f.AddReservation(id, held([]heldPlace{{"a", "n1", gpu.On(0, 8), 1}}, 5)[0])
	}
	f.End(ledger.Reclaimed, "first")
	expect(t, "pods on the node", []gpu.PodUID{"a"}, f.ReservedOn("n1"))
	f.End(ledger.Reclaimed, "second")
	expect(t, "pods on the node in the end", 0, len(f.ReservedOn("n1")))
}

// Reservations with shares on many nodes, and with many on one.
func TestLargeReservations(t *testing.T) {
	f := newFixture(t)
	names := make([]string, 600)
	for i := range names {
		names[i] = fmt.Sprint("node-", i)
		f.SetNode(names[i], spec(16))
	}
	fitting := func() (n int) {
		f.ForEachFit(pod("x", 16), names, func(_ string, reason reasons.Reason) {
			if reason == reasons.Fits {
				n++
			}
		})
		return n
	}
	places := make([]heldPlace, 3000)
	for i := range places {
		places[i] = heldPlace{gpu.PodUID(fmt.Sprint("held-", i)), names[i%2], gpu.On(0, 1), 1}
	}
	f.takeFreed()
	f.AddReservation("item", held(places, 5)[0])
	expect(t, "fitting nodes beside 3,000 shares on two of them", len(names)-2, fitting())
	f.End(ledger.Reclaimed, "item")
	expect(t, "fitting nodes after the end", len(names), fitting())
	expect(t, "freed at the end", names[:2], slices.Compact(f.takeFreed()))

	asking := make([]ledger.Request, len(names)+1)
	for i := range asking {
		asking[i] = ledger.Request{Pod: pod(fmt.Sprint("w", i), 16), Nodes: names}
	}
	expect(t, "awaits one pod more than there is room for", false, f.ReserveAwaited(testItem, asking, longAgo))
	expect(t, "fitting nodes after that", len(names), fitting())
	expect(t, "freed by that, since no pod saw a share", 0, len(f.takeFreed()))
	expect(t, "awaits as many as there is room for", true, f.ReserveAwaited(testItem, asking[:len(names)], longAgo))
	expect(t, "fitting nodes then", 0, fitting())
	expect(t, "all is free", true, f.AwaitedFree(testItem.ID))
}

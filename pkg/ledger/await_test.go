package ledger_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// testItem is the item of most tests. longAgo is before all pods were placed.
var (
	testItem = ledger.Item{ID: "item", Label: "default/train"}
	longAgo  = at.Add(-24 * time.Hour)
)

// await makes the awaited reservation of testItem.
func (f *fixture) await(requests []ledger.Request, priority int32, oldest time.Time) bool {
	item := testItem
	item.Priority = priority
	return f.ReserveAwaited(item, requests, oldest)
}

// A reservation with which its pod fits at once is reported as freed memory: the pod was rejected because the memory was reserved for an item that
// comes later.
func TestAwaitedReservationFits(t *testing.T) {
	f, nodes := newFixture(t, spec(16)), []string{"n1"}
	f.bind("n1", 0, pod("a", 8))
	small := []ledger.Request{{Pod: pod("small", 8), Nodes: nodes}}
	expect(t, "a card of which half is free is reserved", true, f.await(requests(nodes, 16), 0, longAgo))
	expect(t, "the small pod", []reasons.Reason{reasons.Reserved}, f.check(small[0].Pod, nodes...))
	f.takeFreed()
	expect(t, "it gets a reservation", true, f.ReserveAwaited(ledger.Item{ID: "small", CompletesGroup: true}, small, longAgo))
	expect(t, "the small pod, then", []reasons.Reason{reasons.Fits}, f.check(small[0].Pod, nodes...))
	expect(t, "freed", []string{"n1"}, f.takeFreed())
}

func TestAwaitedReservation(t *testing.T) {
	f, nodes := newFixture(t, spec(16, 16), spec(16, 16)), []string{"n1", "n2"}
	// n1 has 16 of 32 allocated, n2 28 of 32. The youngest pod is on the second card of n2.
	f.bind("n1", 0, pod("a", 16))
	f.bind("n2", 0, pod("b", 16))
	f.SetBound("n2", pod("c", 12), gpu.On(1, 12), at.Add(time.Second))
	finds := func(what string, pod gpu.Pod, want ...string) {
		t.Helper()
		var got []string
		f.ForEachFit(pod, nodes, func(name string, reason reasons.Reason) {
			if reason == reasons.Fits {
				got = append(got, name)
			}
		})
		expect(t, what, want, got)
	}
	expect(t, "five cards of four are reserved", false, f.await(requests(nodes, 16, 16, 16, 16, 16), 0, longAgo))
	finds("after a failed reservation", pod("x", 4), nodes...)
	expect(t, "two cards are reserved", true, f.await(requests(nodes, 16, 16), 0, longAgo))
	expect(t, "their nodes", map[gpu.PodUID]string{"w0": "n1", "w1": "n2"}, f.AwaitedNodes())
	finds("the reserved memory counts as used for other pods", pod("x", 4))
	finds("a member", pod("w0", 16), "n1")
	finds("a pod of higher priority", pod("x", 4, 1), nodes...)
	finds("a pod keeps its allocation", pod("c", 12), "n2")
	f.Remove("c")
	finds("freed memory of a reserved card is reserved as well", pod("x", 4))
	places, _ := f.ReserveAll(requests(nodes, 16, 16), nil, binpack, at)
	expect(t, "reservations of the members", 2, len(places))
	f.Release("w0")
	f.Release("w1")
	f.takeFreed()
	f.End(ledger.Queued, testItem.ID)
	f.End(ledger.Queued, testItem.ID)
	expect(t, "freed at the end", nodes, f.takeFreed())
	finds("after the end", pod("x", 4), nodes...)
}

// The reservation is usable only for what the pod asks for now.
func TestAwaitedUsableForDemand(t *testing.T) {
	f := newFixture(t, spec(16, 16))
	asked := requests([]string{"n1"}, 16)
	expect(t, "reserved", true, f.await(asked, 0, longAgo))
	expect(t, "as it was", true, f.AwaitedUsable(testItem, asked))
	changed := slices.Clone(asked)
	changed[0].Pod.RDMA = gpu.RDMAPreferred
	expect(t, "with a label since", false, f.AwaitedUsable(testItem, changed))
}

// Other pods see which nodes have room but for the reservation, by every path.
func TestAwaitedReservationReason(t *testing.T) {
	const fits, full, reserved = reasons.Fits, reasons.Full, reasons.Reserved
	f := newFixture(t, spec(16, 16), spec(16, 16))
	f.bind("n1", 0, pod("a", 12))
	f.bind("n2", 0, pod("b", 16))
	expect(t, "reserved", true, f.await(requests([]string{"n1"}, 16, 16), 1, longAgo))
	expect(t, "label", "default/train", f.ReservedFor(pod("x", 16, 1), []string{"n2", "n1"}))
	expect(t, "the label for a member", "", f.ReservedFor(pod("w0", 16), []string{"n1"}))
	expect(t, "the label on another node", "", f.ReservedFor(pod("x", 16, 1), []string{"n2"}))
	for name, tc := range map[string]struct {
		pod     gpu.Pod
		nominee gpu.Memory
		want    reasons.Reason
	}{
		"a pod for which there would be room":        {pod("x", 16, 1), 0, reserved},
		"a pod of higher priority":                   {pod("x", 16, 2), 0, fits},
		"a pod that is too large":                    {pod("x", 17), 0, reasons.TooLarge},
		"a pod whose room a nominated pod waits for": {pod("x", 8), 16, full},
		"a pod that fits beside a nominated pod":     {pod("x", 8), 8, reserved},
		"a member":                                   {pod("w0", 16), 0, fits},
	} {
		t.Run(name, func(t *testing.T) {
			if f.End(ledger.Nominated, "nominee"); tc.nominee > 0 {
				f.Nominate("n1", pod("nominee", tc.nominee, 5))
			}
			expect(t, "ForEachFit", []reasons.Reason{tc.want}, f.check(tc.pod, "n1"))
			expect(t, "Rank", []reasons.Reason{tc.want}, f.rank(binpack, tc.pod, "n1"))
			_, reason := f.Availability("n1", tc.pod, nil)
			expect(t, "Availability", tc.want, reason)
			var noRoom *ledger.NoRoomError
			if _, err := f.Reserve("n1", tc.pod, placement.Binpack, at); errors.As(err, &noRoom) {
				expect(t, "Reserve", tc.want, noRoom.Reason)
			} else {
				expect(t, "Reserve", tc.want, fits)
			}
			f.Release(tc.pod.UID)
		})
	}
	expect(t, "another node", []reasons.Reason{fits}, f.check(pod("x", 16), "n2"))
	f.End(ledger.Queued, testItem.ID)
	expect(t, "label after the end", "", f.ReservedFor(pod("x", 16, 1), []string{"n1"}))
}

// What is freed for a pod is its own: an item that may not take it gets no reservation there.
func TestAwaitedBesidePlace(t *testing.T) {
	places := map[string]func(f *fixture){
		"nominated": func(f *fixture) { f.Nominate("n1", pod("p", 16, 5), "victim") },
		"reclaimed": func(f *fixture) {
			places := []ledger.Place{{Pod: pod("p", 16, 5), Node: "n1", On: gpu.On(0, 16)}}
			f.AddReservation("item", ledger.Reservation{Source: ledger.Reclaimed, Priority: 5, Places: places})
		},
	}
	for priority, want := range map[int32]reasons.Reason{5: reasons.Fits, 6: reasons.Reserved} {
		for source, make := range places {
			f := newFixture(t, spec(16))
			f.bind("n1", 0, pod("victim", 16))
			make(f)
			expect(t, source+", reserved", priority > 5, f.await(requests([]string{"n1"}, 16), priority, longAgo))
			f.Remove("victim")
			expect(t, source+", the pod", []reasons.Reason{want}, f.check(pod("p", 16, 5), "n1"))
			expect(t, source+", another one", []reasons.Reason{reasons.Full}, f.check(pod("x", 16, 4), "n1"))
		}
	}
}

// A card that is kept for another pod is not reserved.
func TestAwaitedElsewhere(t *testing.T) {
	f := newFixture(t, spec(16), spec(16))
	f.Nominate("n1", pod("p", 16, 5))
	expect(t, "reserved", true, f.await(requests([]string{"n1", "n2"}, 16), 5, longAgo))
	expect(t, "where", map[gpu.PodUID]string{"w0": "n2"}, f.AwaitedNodes())
}

// needNoTurn are the namespaces that are exempt from fair sharing.
type needNoTurn map[string]bool

func (n needNoTurn) NeedsTurn(pod gpu.Pod) bool { return !n[pod.Namespace] }

// With fair sharing, what waits for a turn comes after all that needs none, whatever the priorities.
func TestAwaitedReservationsAndTurns(t *testing.T) {
	const fits, reserved = reasons.Fits, reasons.Reserved
	free, waits := pod("free", 16), pod("waits", 16, 9)
	free.Namespace, waits.Namespace = "exempt", "tenant"
	for name, tc := range map[string]struct {
		item        ledger.Item
		free, waits reasons.Reason
	}{
		"of an item that waits for a turn":     {ledger.Item{ID: "item", Label: "item", ByTurn: true, Priority: 99}, fits, reserved},
		"of an item that needs no turn":        {ledger.Item{ID: "item", Label: "item", Priority: 0}, reserved, reserved},
		"of a less important one without turn": {ledger.Item{ID: "item", Label: "item", Priority: -1}, fits, reserved},
	} {
		f := &fixture{t: t, Ledger: ledger.NewWithResources(nil, needNoTurn{"exempt": true})}
		f.SetNode("n1", spec(16))
		expect(t, name, true, f.ReserveAwaited(tc.item, requests([]string{"n1"}, 16), longAgo))
		expect(t, name+", for a pod that needs no turn", []reasons.Reason{tc.free}, f.check(free, "n1"))
		expect(t, name+", for a pod that waits for a turn", []reasons.Reason{tc.waits}, f.check(waits, "n1"))
	}
}

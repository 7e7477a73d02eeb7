package ledger_test

import (
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// large returns a ledger with 600 nodes of one card, and a request for each of the cards. The freed listener calls meanwhile once, as other
// goroutines can do whenever the lock is free.
func large(t *testing.T, meanwhile *func()) (f *fixture, names []string, asking []ledger.Request) {
	f = newFixture(t)
	names, asking = make([]string, 600), make([]ledger.Request, 600)
	for i := range names {
		names[i] = fmt.Sprint("node-", i)
		f.SetNode(names[i], spec(16))
	}
	for i := range asking {
		asking[i] = ledger.Request{Pod: pod(fmt.Sprint("w", i), 16), Nodes: names}
	}
	f.AddFreedListener(func(string) {
		if call := *meanwhile; call != nil {
			*meanwhile = nil
			call()
		}
	})
	return f, names, asking
}

// If the cards of an item are chosen again, no other pod gets those that were and stay reserved.
func TestAwaitAgainKeepsCards(t *testing.T) {
	var meanwhile func()
	f, names, asking := large(t, &meanwhile)
	expect(t, "all cards are reserved", true, f.ReserveAwaited(testItem, asking, longAgo))
	meanwhile = func() {
		for _, name := range names {
			if _, err := f.Reserve(name, pod("x", 16), placement.Binpack, at); err == nil {
				t.Errorf("another pod gets the card of %s", name)
				return
			}
		}
	}
	expect(t, "and again", true, f.ReserveAwaited(testItem, asking, longAgo))
}

// A reservation that is ended while it is made again keeps nothing.
func TestAwaitEnded(t *testing.T) {
	var meanwhile func()
	f, names, asking := large(t, &meanwhile)
	expect(t, "reserved", true, f.ReserveAwaited(testItem, asking, longAgo))
	meanwhile = func() { f.End(ledger.Queued, testItem.ID) }
	f.ReserveAwaited(testItem, asking, longAgo)
	f.End(ledger.Queued, testItem.ID)
	for _, name := range names {
		if got := f.check(pod("x", 16), name); got[0] != reasons.Fits {
			t.Fatalf("%s: %v", name, got[0])
		}
	}
}

// The pod of an item that comes before loses its allocation while the cards are chosen, so what is reserved for it counts again.
func TestAwaitBesideRelease(t *testing.T) {
	var meanwhile func()
	f, names, asking := large(t, &meanwhile)
	first := ledger.Item{ID: "first", Priority: 9}
	elsewhere := make([]ledger.Request, 40)
	for i := range elsewhere {
		elsewhere[i] = ledger.Request{Pod: pod(fmt.Sprint("e", i), 16), Nodes: names}
	}
	expect(t, "the first item", true, f.ReserveAwaited(first, elsewhere, longAgo))
	f.SetNode("elsewhere", spec(16*40))
	for i := range elsewhere {
		f.reserve("elsewhere", elsewhere[i].Pod)
	}
	expect(t, "the second item", true, f.ReserveAwaited(testItem, asking, longAgo))
	meanwhile = func() {
		for i := range elsewhere {
			f.Release(elsewhere[i].Pod.UID)
		}
	}
	f.ReserveAwaited(testItem, asking, longAgo)
}

// A nomination that is made while an earlier one ends stays.
func TestEndOfOne(t *testing.T) {
	var meanwhile func()
	f, names, asking := large(t, &meanwhile)
	f.Nominate(names[0], asking[0].Pod)
	meanwhile = func() { f.Nominate(names[1], asking[0].Pod) }
	f.End(ledger.Nominated, string(asking[0].Pod.UID))
	expect(t, "another pod", []reasons.Reason{reasons.Fits, reasons.Full}, f.check(pod("x", 16), names[:2]...))
}

// A reservation of reclaim that is ended while it is made isn't begun again.
func TestHoldEnded(t *testing.T) {
	f := newFixture(t, spec(16))
	shares := make([]heldPlace, 5000)
	for i := range shares {
		shares[i] = heldPlace{gpu.PodUID(fmt.Sprint("h", i)), "n1", gpu.On(0, 1), 1}
	}
	for range 20 {
		var holding sync.WaitGroup
		holding.Go(func() { f.AddReservation("item", held(shares, 5)[0]) })
		for len(f.ReservedOn("n1")) == 0 { // Until AddReservation has begun.
			runtime.Gosched()
		}
		f.End(ledger.Reclaimed, "item")
		holding.Wait()
		expect(t, "pods on the node", 0, len(f.ReservedOn("n1")))
		f.End(ledger.Reclaimed, "item")
	}
}

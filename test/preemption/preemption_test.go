package preemption

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/test/framework"
)

// TestPreemption plays each case in a namespace and on a node of its own. Where pods have run since is set such that
// kube-scheduler by itself would evict pods on two cards.
func TestPreemption(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	createPriorities(t, bed, 1, 2, 3, 9)

	play(t, bed, "exactly one card's pods go", 3, func(s *stage) {
		s.place("a9", 9, 1, 0)
		s.place("a7", 7, 1, 0)
		s.place("b9", 9, 1, 1)
		s.place("b7", 7, 1, 1)
		s.place("c9", 9, 1, 2)
		s.place("c7", 7, 1, 2)
		s.started(time.Hour, "a7", "b9", "c9", "c7")
		s.started(time.Minute, "a9", "b7") // 16 together, on two cards.

		s.create("whole", 16, 9)
		s.evicted("a9", "a7")
		s.sits("whole", 0)
		s.stay("b9", "b7", "c9", "c7")
	})

	play(t, bed, "the card whose pods matter least", 3, func(s *stage) {
		s.place("a9", 9, 1, 0)
		s.place("a7", 7, 3, 0)
		s.place("b9", 9, 2, 1)
		s.place("b7", 7, 2, 1)
		s.place("c9", 9, 3, 2)
		s.place("c7", 7, 1, 2)

		// By itself kube-scheduler evicts a9 and c7, the lowest priorities: 16 together, on two cards.
		s.create("whole", 16, 9)
		s.evicted("b9", "b7")
		s.sits("whole", 1)
		s.stay("a9", "a7", "c9", "c7")
	})

	play(t, bed, "a disruption budget comes before a priority", 2, func(s *stage) {
		s.guard("guarded", 0)
		s.place("a9", 9, 1, 0, labelled("guarded"))
		s.place("a7", 7, 1, 0)
		s.place("b9", 9, 1, 1)
		s.place("b7", 7, 2, 1)

		// By itself kube-scheduler evicts a7 and b9.
		s.create("whole", 16, 9)
		s.evicted("b9", "b7")
		s.sits("whole", 1)
		s.stay("a9", "a7")
	})

	play(t, bed, "a disruption budget that allows it is no hindrance", 2, func(s *stage) {
		s.guard("guarded", 2)
		s.place("a9", 9, 1, 0, labelled("guarded"))
		s.place("a7", 7, 1, 0, labelled("guarded"))
		s.place("b9", 9, 1, 1)
		s.place("b7", 7, 2, 1)
		s.create("whole", 16, 9)
		s.evicted("a9", "a7")
		s.sits("whole", 0)
		s.stay("b9", "b7")
	})

	play(t, bed, "room for the preemptor's CPU is made as well", 2, func(s *stage) {
		s.place("a16", 16, 1, 0)
		s.place("b16", 16, 1, 1, cpu(1))
		s.place("busy", 0, 1, -1, cpu(60)) // Of 64.
		s.place("idle", 0, 1, -1, cpu(1))
		s.started(time.Hour, "a16", "b16", "idle")
		s.started(time.Minute, "busy")

		s.create("whole", 16, 9, cpu(10))
		s.evicted("a16", "busy")
		s.sits("whole", 0)
		s.stay("b16", "idle")

		// And nobody goes for CPU that isn't asked for.
		s.create("frugal", 16, 9)
		s.evicted("b16")
		s.sits("frugal", 1)
		s.stay("idle", "whole")
	})

	play(t, bed, "two at once get a card each", 3, func(s *stage) {
		s.place("a9", 9, 1, 0)
		s.place("a7", 7, 1, 0)
		s.place("b9", 9, 1, 1)
		s.place("b7", 7, 1, 1)
		s.place("c9", 9, 2, 2)
		s.place("c7", 7, 2, 2)
		s.kubelet = false
		s.create("first", 16, 9)
		s.evicted("a9", "a7")
		s.create("second", 16, 9)
		s.evicted("a9", "a7", "b9", "b7")
		for _, name := range []string{"b9", "a9", "b7", "a7"} {
			s.end(name)
		}
		if first, second := s.card("first"), s.card("second"); first+second != 1 {
			s.Errorf("they sit on cards %d and %d", first, second)
		}
		s.stay("c9", "c7")
	})

	play(t, bed, "nobody is evicted where only fragmentation is in the way, unless that is asked for", 2, func(s *stage) {
		s.place("a12", 12, 1, 0)
		s.place("b12", 12, 1, 1)
		s.create("blocked", 8, 9)
		s.refused("blocked", "no GPU card has enough free memory")
		s.refused("blocked", "expected at least one victim pod") // kube-scheduler has found none either.
		s.stay("a12", "b12")
	})

	play(t, bed, "what comes free bit by bit is held for whom it was freed", 4, func(s *stage) {
		s.kubelet = false // Pods take their time to end.
		s.place("a9", 9, 1, 0)
		s.place("a7", 7, 1, 0)
		for card, name := range []string{"b11", "c11", "d11"} {
			s.place(name, 11, 9, card+1) // They leave 5 of each card, 15 in all.
		}
		s.create("whole", 16, 9)
		s.evicted("a9", "a7")
		s.nominated("whole")
		s.end("a9")

		// By the node's sum there is room for 6 beside the 16; but on cards it is there only where the other 7 are leaving.
		s.create("small", 6, 2)
		s.refused("small", "no GPU card has enough free memory")
		s.end("a7")
		s.sits("whole", 0)
		s.refused("small", "no GPU card has enough free memory")
		s.stay("b11", "c11", "d11", "small")
	})
}

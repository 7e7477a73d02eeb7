package preemption

import (
	"testing"
)

// TestFragmentation covers --evict-fragmented: the node's sum has room for the pod, but no card has. kube-scheduler doesn't
// ask for victims then.
func TestFragmentation(t *testing.T) {
	c := start(t, "--evict-fragmented")

	play(t, c, "the least that frees one card is evicted", 3, func(s *stage) {
		s.place("a10", 10, 2, 0)
		s.place("a2", 2, 1, 0)
		s.place("b12", 12, 1, 1)
		s.place("c12", 12, 2, 2)
		s.create("blocked", 8, 9)
		s.evicted("b12")
		s.wantCard("blocked", 1)
		s.notEvicted("a10", "a2", "c12")
		s.WaitEvent("b12", "GPUCardEvicted", "for pod "+s.ID+"/blocked")
		s.WaitEvent("blocked", "GPUCardEvicting", "GPU card 1")
	})

	play(t, c, "the freed card is kept for the blocked pod", 2, func(s *stage) {
		s.slow = true
		s.place("a12", 12, 1, 0)
		s.place("b12", 12, 2, 1)
		s.create("blocked", 6, 9)
		s.evicted("a12")
		s.create("thief", 5, 3)
		s.end("a12")
		s.wantCard("blocked", 0)
		s.wantCard("thief", 0) // There is room for both.
		s.create("waits", 6, 3)
		s.evicted("b12", "a12") // b12 for the pod waits.
		s.notEvicted("blocked", "thief")
	})

	play(t, c, "pods that may not evict", 2, func(s *stage) {
		s.guard()
		s.placeGuarded("a12", 12, 1, 0)
		s.place("b12", 12, 3, 1)
		// The budget allows no eviction, equal priority doesn't evict, and some pods never preempt. (With a higher priority,
		// equal could find the node full in the end, and kube-scheduler itself breaks budgets if nothing else helps.)
		s.create("equal", 8, 1)
		s.Create(s.pod("polite", 8, 9).PriorityClass(never))
		s.WaitUnschedulable("equal", "no GPU card has enough free memory")
		s.WaitUnschedulable("polite", "no GPU card has enough free memory")
		// A pod that may evict gets a card. Evictions for the others would have come before or with it.
		s.create("blocked", 8, 9)
		s.evicted("b12")
		s.wantCard("blocked", 1)
		s.notEvicted("a12", "equal", "polite")
	})

	play(t, c, "an extender that is killed in between evicts no other pod", 2, func(s *stage) {
		s.slow = true
		s.place("a5", 5, 1, 0)
		s.place("a4", 4, 1, 0)
		s.place("b12", 12, 2, 1)
		s.create("blocked", 10, 9)
		s.evicted("a4")
		must(s, c.Extender.Restart(s.Context()))
		s.evicted("a4")
		s.end("a4")
		s.wantCard("blocked", 0)
		s.notEvicted("a5", "b12")
	})

	play(t, c, "a pod whose nomination has failed gets a card", 3, func(s *stage) {
		s.slow = true
		s.place("a12", 12, 1, 0)
		s.place("a4", 4, 30, 0)
		s.place("b8", 8, 5, 1)
		s.place("b5", 5, 30, 1)
		s.place("c8", 8, 30, 2)
		s.place("c5", 5, 30, 2)
		s.create("left", 9, 9)
		s.nominated("left")
		s.evicted("a12")
		s.create("first", 12, 20)
		s.nominated("first")
		// From now on the sum has room for both, and kube-scheduler finds no victim for the other pod.
		s.end("b5")
		s.end("c5")
		s.end("a12")
		s.wantCard("first", 0)
		s.evicted("b8", "a12")
		s.end("b8")
		s.wantCard("left", 1)
		s.notEvicted("a4", "c8")
	})
}

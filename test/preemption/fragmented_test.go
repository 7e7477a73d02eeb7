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

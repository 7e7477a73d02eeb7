package preemption

import (
	"testing"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// TestPreemption covers victims that kube-scheduler proposes. In some cases the pods' start times are set such that
// kube-scheduler alone would evict pods on two cards.
func TestPreemption(t *testing.T) {
	c := start(t)

	play(t, c, "the pods of exactly one card are evicted", 3, func(s *stage) {
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
		s.wantCard("whole", 0)
		s.notEvicted("b9", "b7", "c9", "c7")
	})

	play(t, c, "two preemptors get a card each", 3, func(s *stage) {
		s.place("a9", 9, 1, 0)
		s.place("a7", 7, 1, 0)
		s.place("b9", 9, 1, 1)
		s.place("b7", 7, 1, 1)
		s.place("c9", 9, 2, 2)
		s.place("c7", 7, 2, 2)
		s.slow = true
		s.create("first", 16, 9)
		s.evicted("a9", "a7")
		s.create("second", 16, 9)
		s.evicted("a9", "a7", "b9", "b7")
		for _, name := range []string{"b9", "a9", "b7", "a7"} {
			s.end(name)
		}
		if first, second := s.CardOf(s.WaitBound("first")), s.CardOf(s.WaitBound("second")); first == second {
			s.Errorf("both are on card %d", first)
		}
		s.notEvicted("c9", "c7")
	})

	play(t, c, "without --evict-fragmented kube-scheduler up to 1.37 evicts no pod for fragmented memory", 2, func(s *stage) {
		s.place("a12", 12, 1, 0)
		s.place("b12", 12, 1, 1)
		s.create("blocked", 8, 9)
		s.WaitUnschedulable("blocked", "no GPU card has enough free memory")
		s.WaitUnschedulable("blocked", "expected at least one victim pod") // kube-scheduler finds none either.
		s.notEvicted("a12", "b12")
	})

	play(t, c, "memory that victims free one after the other is kept for the preemptor", 4, func(s *stage) {
		s.slow = true
		s.place("a9", 9, 1, 0)
		s.place("a7", 7, 1, 0)
		for card, name := range []string{"b11", "c11", "d11"} {
			s.place(name, 11, 9, card+1) // They leave 5 of each card, 15 in all.
		}
		s.create("whole", 16, 9)
		s.evicted("a9", "a7")
		s.nominated("whole")
		s.end("a9")

		// The node's sum has room for 6 beside the 16, but the only card with room is that of the other victim.
		s.create("small", 6, 2)
		s.WaitUnschedulable("small", "no GPU card has enough free memory")
		s.end("a7")
		s.wantCard("whole", 0)
		s.WaitUnschedulable("small", "no GPU card has enough free memory")
		s.notEvicted("b11", "c11", "d11", "small")
	})
	t.Run("the pod on the card near an adapter is evicted, although others are less important", func(t *testing.T) {
		s := &stage{Namespace: c.NewNamespace(t)}
		s.node = s.NodeName("node")
		s.AddNodes(framework.MakeNode("node").Unit(gpu.GiB).Cards(3, 16).NearAdapter(1))
		near := func(name string, memory int64, priority int32) *framework.PodWrapper {
			return s.pod(name, memory, priority).Label(protocol.LabelRDMA, protocol.RDMARequired)
		}
		s.place("a", 16, 1, 0)
		s.place("b", 16, 5, 1)
		s.place("c", 16, 1, 2)
		s.Create(near("preemptor", 8, 9))
		s.evicted("b")
		s.wantCard("preemptor", 1)
		s.notEvicted("a", "c")
		s.Create(near("next", 12, 5))
		s.WaitUnschedulable("next", "preemption: ") // kube-scheduler proposes a or c, which wouldn't help.
		s.notEvicted("a", "c", "preemptor", "next")
		s.CheckLedger()
	})
}

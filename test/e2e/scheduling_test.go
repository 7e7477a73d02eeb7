package e2e

import (
	"testing"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// TestScheduling shows kube-scheduler and the extender together, on nodes on which nothing needs to run.
func TestScheduling(t *testing.T) {
	c := shared.Start(t)
	fragmented := func(s *scene) float64 {
		return c.Metric(s, framework.MetricFilteredNodes, "reason", "fragmented")
	}

	play(t, c, "filter passes the node with 8138 MiB on one card", func(s *scene) {
		s.AddNodes(node("n1", cardMiB, cardMiB), node("n2", cardMiB, cardMiB), node("n3", cardMiB, cardMiB))
		s.fill("n1", 16276, 12207) // 4069 are free.
		s.fill("n2", 12207, 12207) // 4069 are free on each card.
		s.fill("n3", 8138, 16276)  // 8138 are free on card 0.
		before := fragmented(s)

		s.WantCard(s.Place(s.Pod("anywhere", 8138)), s.NodeName("n3"), 0)

		if got := fragmented(s) - before; got != 1 {
			s.Errorf("the extender rejected %v nodes as fragmented, want n2 only: kube-scheduler itself rejects n1", got)
		}
		// The sum of n2 would be enough, so it is the extender that rejects it.
		s.Create(s.Pod("only-n2", 8138).OnNode(s.NodeName("n2")), s.Pod("only-n1", 8138).OnNode(s.NodeName("n1")))
		s.rejected("only-n2", "1 no GPU card has enough free memory")
		s.rejected("only-n1", "1 Insufficient "+string(protocol.ResourceMemory))
	})

	play(t, c, "a pod without room is pending, and gets the place of a deleted pod", func(s *scene) {
		s.AddNodes(node("n1", cardMiB, cardMiB), node("n2", 8137))
		s.fill("n1", 12207, 12207)
		s.Create(s.Pod("pending", 8138))
		reason := s.WaitEvent("pending", "FailedScheduling")
		if !framework.ContainsAll(reason, "1 no GPU card has enough free memory", "1 Insufficient "+string(protocol.ResourceMemory)) {
			s.Errorf("the Event is %q", reason)
		}
		s.Delete("n1-1")
		s.WantCard(s.WaitBound("pending"), s.NodeName("n1"), 1)
	})

	play(t, c, "two cards for one pod, and a share of computing", func(s *scene) {
		s.AddNodes(node("n1", cardMiB, cardMiB, cardMiB))
		n1 := s.NodeName("n1")
		s.WantCard(s.Place(s.Pod("one", 12207).Cores(80)), n1, 0)
		two := s.Place(s.Pod("two", 8138).Cards(2).Cores(60)) // Card 0 has room for 4069 MiB, and none for 30%.
		want := map[string]string{
			protocol.AnnotationIndex: "1,2", protocol.AnnotationDevice: "16276,16276", protocol.AnnotationPod: "8138",
			protocol.AnnotationAllocation: `{"0":{"1":4069,"2":4069}}`,
		}
		for key, value := range want {
			if two.Annotations[key] != value {
				s.Errorf("annotation %s is %q, want %q", key, two.Annotations[key], value)
			}
		}
		s.CheckLedger()
		s.Create(s.Pod("three", 3*4100).Cards(3), s.Pod("invalid", 4069).Cards(2), s.Pod("computing", 1024).Cores(90))
		s.rejected("three", "1 too few GPU cards have enough free memory and cores, though the node's cards together have")
		s.rejected("invalid", "container main: aliyun.com/gpu-mem 4069 can't be divided evenly over 2 cards")
		s.rejected("computing", "1 too few GPU cards have enough free memory and cores, though the node's cards together have")
		s.Delete("one")
		s.WaitBound("computing")
		s.CheckLedger()
	})
}

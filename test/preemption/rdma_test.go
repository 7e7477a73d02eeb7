package preemption

import (
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// TestRDMA: preemptors and groups that must have cards near an adapter get only such cards.
func TestRDMA(t *testing.T) {
	c := start(t)
	near := func(pod *framework.PodWrapper) *framework.PodWrapper {
		return pod.Label(protocol.LabelRDMA, protocol.RDMARequired)
	}
	scene := func(title string, act func(s *stage)) {
		t.Run(title, func(t *testing.T) {
			s := &stage{Namespace: c.NewNamespace(t)}
			act(s)
			s.CheckLedger()
		})
	}

	scene("a preemptor evicts the pod on the card near an adapter, although others are less important", func(s *stage) {
		s.node = s.NodeName("node")
		s.AddNodes(framework.MakeNode("node").Unit(gpu.GiB).Cards(3, 16).NearAdapter(1))
		s.place("a", 16, 1, 0)
		s.place("b", 16, 5, 1)
		s.place("c", 16, 1, 2)
		s.Create(near(s.pod("preemptor", 8, 9)))
		s.evicted("b")
		s.wantCard("preemptor", 1)
		s.notEvicted("a", "c")
		s.Create(near(s.pod("next", 12, 5)))
		s.WaitUnschedulable("next", "preemption: ") // kube-scheduler proposes a or c, which wouldn't help.
		s.notEvicted("a", "c", "preemptor", "next")
	})

	scene("a group gets only cards near an adapter, and waits for all of them", func(s *stage) {
		s.AddNodes(
			framework.MakeNode("first").Unit(gpu.GiB).Cards(3, 16).NearAdapter(2),
			framework.MakeNode("second").Unit(gpu.GiB).Cards(3, 16).NearAdapter(1),
			framework.MakeNode("without").Unit(gpu.GiB).Cards(3, 16),
		)
		for _, member := range []string{"m0", "m1", "m2"} {
			s.Create(near(s.pod(member, 12, 2)).Group("workers", 3))
		}
		s.WaitUnschedulable("m2", "gang: ")
		s.Create(s.pod("other", 16, 2)) // The scheduler works, and other cards are free.
		s.WaitBound("other")
		for _, member := range []string{"m0", "m1", "m2"} {
			if pod := s.Get(member); pod.Spec.NodeName != "" {
				s.Errorf("%s is bound to %s although not all members have cards", member, pod.Spec.NodeName)
			}
		}
		s.AddNodes(framework.MakeNode("more").Unit(gpu.GiB).Cards(3, 16).NearAdapter(0))
		want := map[string]int{s.NodeName("first"): 2, s.NodeName("second"): 1, s.NodeName("more"): 0}
		for _, member := range []string{"m0", "m1", "m2"} {
			pod := s.WaitBound(member)
			card, known := want[pod.Spec.NodeName]
			if !known || s.CardOf(pod) != card {
				s.Errorf("%s is on card %d of %s, want one near an adapter: %v", member, s.CardOf(pod), pod.Spec.NodeName, want)
			}
		}
	})
}

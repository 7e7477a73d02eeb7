package e2e

import (
	"fmt"
	"testing"

	"github.com/gpushare/gpushare/test/framework"
)

// TestSamples: kube-scheduler offers samples of 100 of 400 nodes, on most of which only the sum of two cards is enough. Pods get the nodes
// that have room, by nominations where a sample has none, and no pod is evicted for them.
func TestSamples(t *testing.T) {
	c := framework.StartForTest(t, framework.Options{Samples: true})
	high := c.PriorityClass(t, 1000)
	nominations := func(s *scene) float64 { return c.Metric(s, framework.MetricNominations, "result", "made") }
	nodes := []*framework.NodeWrapper{node("roomy", cardMiB), node("busy-1", cardMiB), node("busy-2", cardMiB)}
	for i := range 397 {
		nodes = append(nodes, node(fmt.Sprint("half-", i), cardMiB/2, cardMiB/2))
	}
	play(t, c, "a pod of high priority", func(s *scene) {
		s.AddNodes(nodes...)
		s.fill("busy-1", 12207)
		s.fill("busy-2", 12207)
		before := nominations(s)
		for i := range 20 { // Now and then a sample has the node with room.
			pod := s.Place(s.Pod(fmt.Sprint("urgent-", i), 12207).PriorityClass(high))
			s.WantCard(pod, s.NodeName("roomy"), 0)
			s.remove(pod.Name)
			if nominations(s) > before {
				break
			}
		}
		if nominations(s) == before {
			s.Error("no pod was nominated: this scene shows nothing")
		}
		for _, name := range []string{"busy-1-0", "busy-2-0"} {
			if pod := s.Get(name); pod.DeletionTimestamp != nil {
				s.Errorf("pod %s is evicted", name)
			}
		}
	})
}

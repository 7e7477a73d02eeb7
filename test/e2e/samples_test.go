package e2e

import (
	"fmt"
	"testing"

	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/test/framework"
)

// TestSamples: kube-scheduler offers samples of 100 of 400 nodes, on most of which only the sum of two cards is enough. Pods get the nodes
// that have room, by nominations where a sample has none, and no pod is evicted for them.
func TestSamples(t *testing.T) {
	c := framework.StartForTest(t, framework.Options{Samples: true})
	class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "high"}, Value: 1000}
	_, err := c.Client.SchedulingV1().PriorityClasses().Create(t.Context(), class, metav1.CreateOptions{})
	must(t, err)
	nominations := func(s *scene) float64 { return c.Metric(s, framework.MetricNominations, "result", "made") }
	half := func(n int) (nodes []*framework.NodeWrapper) {
		for i := range n {
			nodes = append(nodes, node(fmt.Sprint("half-", i), cardMiB/2, cardMiB/2))
		}
		return nodes
	}

	play(t, c, "a pod of high priority", func(s *scene) {
		s.AddNodes(append(half(397), node("roomy", cardMiB), node("busy-1", cardMiB), node("busy-2", cardMiB))...)
		s.fill("busy-1", 12207)
		s.fill("busy-2", 12207)
		before := nominations(s)
		for i := range 20 { // Now and then a sample has the node with room.
			pod := s.Place(s.Pod(fmt.Sprint("urgent-", i), 12207).PriorityClass("high"))
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

	play(t, c, "a group", func(s *scene) {
		nodes := half(396)
		for i := range 4 {
			nodes = append(nodes, node(fmt.Sprint("roomy-", i), cardMiB))
		}
		s.AddNodes(nodes...)
		before := nominations(s)
		for i := range 20 { // kube-scheduler can try a member again with the next sample before it is nominated.
			var members []*framework.PodWrapper
			for j := range 4 {
				members = append(members, s.Pod(fmt.Sprintf("job-%d-%d", i, j), 12207).Group(fmt.Sprint("job-", i), 4))
			}
			s.Create(members...)
			for _, pod := range members {
				s.WaitBound(pod.Name)
			}
			for _, pod := range members {
				s.remove(pod.Name)
			}
			if nominations(s) > before {
				return
			}
		}
		s.Error("no member was nominated: this scene shows nothing")
	})
}

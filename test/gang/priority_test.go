package gang

import (
	"testing"

	"github.com/gpushare/gpushare/test/framework"
)

// TestDisplaced creates a pod of higher priority while the memory of all cards is reserved for a gang: seven of its members
// are held, and the eighth can't be scheduled. The pod must not wait for the end of that attempt.
func TestDisplaced(t *testing.T) {
	c := shared.Start(t)
	high := c.PriorityClass(t, 1000)
	for title, node := range map[string]string{
		"filter finds no card: kube-scheduler counts three of four members": "n1",
		"kube-scheduler finds no node: it counts four of four members":      "n0",
	} {
		t.Run(title, func(t *testing.T) {
			f := newFixture(t, c, 4, 4)
			members := f.members("g", 8, 0, 8)
			for i, pod := range members {
				pod.OnNode(f.NodeName([]string{"n0", "n1"}[i/4]))
			}
			f.Create(members[:6]...)
			f.waitRejected("g", 6, "6 of 8 members exist")
			f.Create(members[6].HostPort(8080), members[7].HostPort(8080))
			f.waitAnyRejected("g", "free ports")

			failures := func() float64 {
				return c.Metric(t, framework.MetricGangFailures, "reason", "timed_out") + c.Metric(t, framework.MetricGangFailures, "reason", "expired")
			}
			before, displaced := failures(), c.Metric(t, framework.MetricGangFailures, "reason", "gave_way")
			f.Place(f.Pod("important", card).PriorityClass(high).OnNode(f.NodeName(node)))
			if n := failures() - before; n > 0 {
				t.Errorf("it was bound after the gang's attempt had failed (%v times)", n)
			}
			if c.Metric(t, framework.MetricGangFailures, "reason", "gave_way") <= displaced {
				t.Error("the gang didn't give way")
			}
			f.waitBound(map[string]int{"": 1})
			f.CheckLedger()
		})
	}
}

package gang

import (
	"testing"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestLowestPriorityCounts creates a gang of seven members of low priority and one of high priority. It must not hold up pods
// and gangs whose priority is between: neither by its awaited reservation nor when it competes for the same cards.
func TestLowestPriorityCounts(t *testing.T) {
	if !controlplane.Long() {
		t.Skip("pkg/scheduling has the same scene; make test-long runs it here")
	}
	c := hasty.Start(t)
	c.RestartExtenderWith(t, flagMaxIdle+"2")
	between, high := priorityClass(t, c, 500), priorityClass(t, c, 1000)
	f := newFixture(t, c, 4, 4)
	f.Place(f.Pod("blocker", card).PriorityClass(between))

	before := c.Metric(t, framework.MetricReservations)
	lifted := f.members("lifted", 8, 0, 8)
	lifted[7].PriorityClass(high)
	f.Create(lifted...)
	c.WaitMetric(t, before+1, framework.MetricReservations)
	f.placeSingles(32, func(pod *framework.PodWrapper) { pod.PriorityClass(between) })

	honest := f.members("honest", 8, 0, 8)
	for _, pod := range honest {
		pod.PriorityClass(between)
	}
	f.Create(honest...)
	f.staysPending(16, map[string]int{"": 1})
	f.Delete("blocker")
	if first := f.waitOneWhole(8); first != "honest" {
		t.Errorf("gang %s goes first", first)
	}
}

// TestDisplaced creates a pod of higher priority while the memory of all cards is reserved for a gang: seven of its members
// are held, and the eighth can't be scheduled. The pod must not wait for the end of that attempt.
func TestDisplaced(t *testing.T) {
	c := shared.Start(t)
	high := priorityClass(t, c, 1000)
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

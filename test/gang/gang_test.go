package gang

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// TestAllOrNothing is the case that gangs are made for: a hundred pods of a card each, and ninety-nine free cards.
func TestAllOrNothing(t *testing.T) {
	f := newFixture(t, shared.Start(t), 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 4)
	f.Place(f.Pod("single", card))

	f.Create(f.members("job", 100, 0, 60)...)
	f.waitRejected("job", 60, "members exist")
	f.Create(f.members("job", 100, 60, 100)...)
	f.waitRejected("job", 100, "no room for all members at once")
	f.waitBound(map[string]int{"": 1})

	start := time.Now()
	others := []string{"other-0", "other-1", "other-2"}
	for _, name := range others {
		f.Place(f.Pod(name, card))
	}
	t.Logf("three single pods were bound within %v", time.Since(start).Round(time.Millisecond))
	f.Delete(others...)

	start = time.Now()
	f.Delete("single")
	f.waitBound(map[string]int{"job": 100})
	t.Logf("all 100 were bound %v after the last card was freed", time.Since(start).Round(time.Millisecond))
	f.CheckLedger()
}

// TestMembers covers replaced, surplus and invalid members.
func TestMembers(t *testing.T) {
	c := shared.Start(t)
	f := newFixture(t, c, 2, 2)

	// A deleted member is replaced although only one card is free.
	f.createGang("job", 3)
	f.waitBound(map[string]int{"job": 3})
	f.Place(f.Pod("single", card))
	f.Delete("job-1")
	f.Place(f.member("job", 3, 1, card))
	// The same with an extender that was started after the gang was bound.
	must(t, c.Extender.Restart(t.Context()))
	f.Delete("job-0")
	f.Place(f.member("job", 3, 0, card))
	// A surplus member is bound when there is room.
	f.Create(f.member("job", 3, 3, card))
	f.waitRejected("job", 1, "Insufficient")
	f.Delete("single")
	f.waitBound(map[string]int{"job": 4})
	f.endGang("job")

	// Members that disagree on the size, annotations that contradict labels, and a launcher that requests no cards.
	f.Create(f.member("x", 2, 0, card)) // The Event is on the oldest.
	f.Create(f.member("x", 3, 1, card))
	// On a slow machine x-0 is tried twice before x-1 exists, and then not again.
	f.WaitUnschedulable("x-1", "the members disagree on the group's size")
	f.Create(f.Pod("y-0", card).GroupLabels("y", 1).Annotation(protocol.AnnotationGroupName, "z").Annotation(protocol.AnnotationGroupSize, "1"))
	f.waitRejected("y", 1, "annotations and labels disagree")
	f.Create(f.Pod("mpi-launcher", 0).GroupLabels("mpi", 2), f.Pod("mpi-worker", card).GroupLabels("mpi", 2))
	f.waitRejected("mpi", 1, "1 of 2 members exist")
	f.WaitEvent("mpi-worker", "GangIncomplete", "1 that ask for no cards")
	f.WaitEvent("x-0", "GangInvalid", "disagree")
	f.WaitEvent("y-0", "GangInvalid", "disagree")
	f.Delete("x-1")
	f.Create(f.member("x", 2, 1, card), f.Pod("mpi-worker-1", card).GroupLabels("mpi", 2))
	f.waitBound(map[string]int{"x": 2, "mpi": 3}) // The launcher isn't held.
	f.CheckLedger()
}

// TestSpread: a group has all cards of two nodes, and kube-scheduler must spread its members evenly over these.
func TestSpread(t *testing.T) {
	f := newFixture(t, shared.Start(t), 4, 4)
	members := f.members("spread", 8, 0, 8)
	for _, pod := range members {
		pod.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
			MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.DoNotSchedule,
			LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{framework.LabelGroup: "spread"}},
		}}
	}
	f.Create(members...)
	f.waitBound(map[string]int{"spread": 8})
	f.CheckLedger()
}

// TestPreempted lets kube-scheduler evict a member whose bind is held, for a pod of higher priority. The other member has no
// eligible node. Then no member is bound and nothing is assumed. With room for both the gang is bound.
func TestPreempted(t *testing.T) {
	c := shared.Start(t)
	important := c.PriorityClass(t, 1000)
	f := newFixture(t, c, 2)
	member := func(gang string, i int) *framework.PodWrapper {
		return f.member(gang, 2, i, card).CPU(20).SeparateFrom(framework.LabelGroup, gang)
	}
	for round := range controlplane.Times(1, 20) {
		gang, first := fmt.Sprintf("g%d", round), fmt.Sprintf("first-%d", round)
		dropped := c.Metric(t, framework.MetricGangFailures, "reason", "deleted")
		f.Create(member(gang, 0), member(gang, 1))
		c.WaitMetric(t, 1, framework.MetricGangs, "phase", "permitting")
		f.Place(f.Pod(first, 0).CPU(50).PriorityClass(important)) // Of 64.
		f.waitBound(map[string]int{"": 1})
		c.WaitNoneAssumed(t)
		evicted := 0
		for i := range 2 {
			pod := member(gang, i)
			if _, err := f.Pods().Get(t.Context(), pod.Name, metav1.GetOptions{}); apierrors.IsNotFound(err) {
				evicted++
				f.WaitEvent(pod.Name, "Preempted", "Preempted by pod")
				f.Create(pod)
			}
		}
		if evicted == 0 {
			t.Errorf("round %d: no member was evicted: the test shows nothing", round)
		}
		if c.Metric(t, framework.MetricGangFailures, "reason", "deleted") <= dropped {
			t.Errorf("round %d: the plan wasn't dropped for the deleted member", round)
		}

		f.Delete(first)
		f.AddNodes(f.node(1+round, 1))
		f.waitBound(map[string]int{gang: 2})
		f.CheckLedger()
		f.endGang(gang)
		must(t, c.Client.CoreV1().Nodes().Delete(t.Context(), f.NodeName(fmt.Sprintf("n%d", 1+round)), metav1.DeleteOptions{}))
	}
}

// TestWholeCards shows that members that request nvidia.com/gpu are also counted and held. kube-scheduler chooses their
// nodes.
func TestWholeCards(t *testing.T) {
	c := hasty.Start(t)
	f := newFixture(t, c)
	wholeCards := func(name string, n int64) *framework.NodeWrapper {
		return framework.MakeNode(name).Capacity(protocol.ResourceWholeCard, n)
	}
	member := func(gang string, size, i int) *framework.PodWrapper { return f.member(gang, size, i, 0).WholeCards(1) }
	f.AddNodes(wholeCards("whole-0", 4), wholeCards("whole-1", 4))
	// Two gangs of five on eight cards, created alternately pod by pod: one gets five cards, the other none.
	for i := range 5 {
		f.Create(member("a", 5, i))
		f.Create(member("b", 5, i))
	}
	first := f.waitOneWhole(5)
	f.DeleteGroup(first)
	second := f.waitOneWhole(5)
	if first == second {
		t.Errorf("%s was bound twice", first)
	}
	f.DeleteGroup(second)
	f.Create(member("c", 2, 0))
	f.waitRejected("c", 1, "1 of 2 members exist")

	// Whole cards aren't reserved: with nine members and eight cards, the hold times out until there is a ninth card.
	before := c.Metric(t, framework.MetricGangFailures, "reason", "timed_out")
	for i := range 9 {
		f.Create(member("d", 9, i))
	}
	f.Eventually("the hold of eight binds has timed out", func(ctx context.Context) error {
		if counts, err := f.bound(ctx); err != nil || len(counts) > 0 {
			t.Fatalf("bound: %v, %v", counts, err)
		}
		if c.Metric(t, framework.MetricGangFailures, "reason", "timed_out") <= before {
			return errors.New("it has not")
		}
		return nil
	})
	f.AddNodes(wholeCards("whole-2", 1))
	f.waitBound(map[string]int{"d": 9})
}

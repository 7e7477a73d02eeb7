package requeue

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// attemptsFixture is a Requeuer for a cluster of 1,000 nodes, of which n1 has cards, with the pending pod p.
type attemptsFixture struct {
	*fixture
	requeues []string
}

func newAttemptsFixture(t *testing.T) *attemptsFixture {
	f := &attemptsFixture{fixture: newFixture(t, fake.Node("n1", 100))}
	for i := range 999 {
		f.cache.nodes = append(f.cache.nodes, fake.Node(fmt.Sprint("plain-", i)))
	}
	f.setPod(fake.Pod("p", 10))
	return f
}

func (f *attemptsFixture) setPod(pod *corev1.Pod) {
	info := clustercache.NewPodInfo(pod)
	f.cache.pending[info.UID] = info
}

// pass lets time pass and makes the rounds that Run would make. It records the requests to requeue all pods.
func (f *attemptsFixture) pass(time time.Duration) {
	for end := f.clock.Now().Add(time); f.clock.Now().Before(end); {
		f.clock.Step(writeInterval)
		f.RetrySamples()
		if f.requested {
			f.requeues, f.requested = append(f.requeues, f.requestedNode), false
		}
	}
}

const podP = "uid-p"

// rejectSampled makes filter reject the pod for all of n candidate nodes.
func (f *attemptsFixture) rejectSampled(n int) { f.Rejected(pod(podP, 10), sample(n), f.Revision()) }

// A pod has a place by fair sharing outside the sample that rejected it. It is tried with further samples.
func TestSampledPodWithAPlaceIsRequeued(t *testing.T) {
	f := newAttemptsFixture(t)
	f.allocate("n1", pod("other", 90))
	if _, err := f.ledger.Reserve("n1", f.cache.pending[podP].Pod, placement.Binpack, f.clock.Now()); err != nil {
		t.Fatal(err)
	}
	f.rejectSampled(minFeasibleNodesToFind)
	f.pass(ledger.TentativeLifetime)
	check.Equal(t, "requeues", []string{"n1"}, f.requeues)
}

func TestSampledPodIsRequeued(t *testing.T) {
	f := newAttemptsFixture(t)
	f.rejectSampled(minFeasibleNodesToFind)
	f.pass(ledger.TentativeLifetime)
	if diff := cmp.Diff([]string{"n1"}, f.requeues); diff != "" {
		t.Fatalf("requeues (-want +got):\n%s", diff)
	}
	// The pod is rejected repeatedly. Soon every node has been in a sample twice, and from then on the pauses grow.
	f.rejectSampled(minFeasibleNodesToFind)
	f.pass(time.Minute)
	first := len(f.requeues)
	f.pass(time.Hour)
	if later := len(f.requeues) - first; first < 22 || later < 10 || later > 20 {
		t.Errorf("%d requeues in the first minute and %d in the hour after it, want at least 22 and 10 to 20", first, later)
	}
}

func TestSampledPodIsNotRequeued(t *testing.T) {
	full := gpu.Pod{UID: "full", Request: 95}
	for name, test := range map[string]struct {
		sample int
		change func(f *attemptsFixture)
	}{
		"no node was left out":           {minFeasibleNodesToFind - 1, func(*attemptsFixture) {}},
		"no other node has room":         {minFeasibleNodesToFind, func(f *attemptsFixture) { f.allocate("n1", full) }},
		"it can't use the node":          {minFeasibleNodesToFind, func(f *attemptsFixture) { f.ineligible = map[string]bool{"n1": true} }},
		"the node was deleted":           {minFeasibleNodesToFind, func(f *attemptsFixture) { f.cache.nodes = nil }},
		"the pod passed since":           {minFeasibleNodesToFind, func(f *attemptsFixture) { f.Passed(podP, false) }},
		"a bind of the pod has begun":    {minFeasibleNodesToFind, func(f *attemptsFixture) { f.BindStarted(podP) }},
		"the pod isn't pending any more": {minFeasibleNodesToFind, func(f *attemptsFixture) { delete(f.cache.pending, podP) }},
		"another replica leads":          {minFeasibleNodesToFind, func(f *attemptsFixture) { f.standby = errors.New("standby") }},
	} {
		t.Run(name, func(t *testing.T) {
			f := newAttemptsFixture(t)
			f.rejectSampled(test.sample)
			test.change(f)
			f.pass(10 * time.Minute)
			if len(f.requeues) > 0 {
				t.Errorf("requeued by %v", f.requeues)
			}
			if f.standby == nil && len(f.tried) > 0 {
				t.Errorf("still remembered: %v", f.tried)
			}
		})
	}
}

// filter names a few nodes and no bind follows: once kube-scheduler has rejected the pod it is requeued, and filter
// names every node.
func TestFewNamedNodesWithoutBind(t *testing.T) {
	f := newAttemptsFixture(t)
	if f.NameAll(podP) {
		t.Fatal("every node is to be named for a pod that was never filtered")
	}
	f.Passed(podP, true)
	f.pass(10 * time.Second) // A step before the bind takes time, such as the creation of a volume.
	if len(f.requeues) > 0 {
		t.Fatalf("requeued by %v, though kube-scheduler hasn't rejected the pod", f.requeues)
	}
	f.setPod(fake.Pod("p", 10, func(pod *corev1.Pod) {
		pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse}}
	}))
	f.pass(10 * time.Second)
	if diff := cmp.Diff([]string{""}, f.requeues); diff != "" {
		t.Fatalf("requeues (-want +got):\n%s", diff)
	}
	if !f.NameAll(podP) {
		t.Error("few nodes are to be named again")
	}
	f.Passed(podP, false)
	f.pass(time.Hour) // The pod is rejected although filter named every node, so filter is not the cause.
	if len(f.requeues) != 1 || !f.NameAll(podP) {
		t.Errorf("requeues %q, and then few nodes are named again", f.requeues)
	}
	f.BindStarted(podP)
	if f.NameAll(podP) || len(f.tried) > 0 {
		t.Errorf("the pod is remembered after its bind: %v", f.tried)
	}
}

// A second filter call without a bind in between gets every node, even before the pod is due.
func TestNameAllWithoutRequeue(t *testing.T) {
	f := newAttemptsFixture(t)
	f.Passed(podP, true)
	if !f.NameAll(podP) {
		t.Error("few nodes are to be named again")
	}
	f.rejectSampled(minFeasibleNodesToFind)
	f.Passed(podP, false)
	if !f.NameAll(podP) {
		t.Error("a rejection in between makes filter name few nodes again")
	}
}

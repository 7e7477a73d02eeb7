package scheduling

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/test/fake"
	"github.com/gpushare/gpushare/test/framework"
)

// TestLeastWaste: pods that come need CPU. A pod that needs none goes to the node whose CPU others use, by filter and by prioritize, whatever the
// number of candidate nodes.
func TestLeastWaste(t *testing.T) {
	for name, few := range map[string]int{"filter passes the best node": 0, "prioritize decides": 32} {
		t.Run(name, bubble(func(t *testing.T) {
			f := startCache(t, Options{FilterBest: 1})
			f.FilterBestAbove, f.NodePolicy = few, placement.LeastWaste
			handlers, e := (*eventHandlers)(f.Scheduler), f.newExpectations() // Its loop doesn't run.
			f.expectations = e
			nodes := []string{"n1", "n2", "n3"}
			for _, node := range nodes {
				handlers.NodeUpdated(framework.MakeNode(node).Cards(1, 16).Obj())
			}
			if !e.changed.Swap(false) {
				t.Error("a new outlook isn't due after changes of nodes")
			}
			withCPU := func(name, node string, request, cpus int64) *clustercache.PodInfo {
				return clustercache.NewPodInfo(fake.Pod(name, request, fake.On(node), fake.CPU(cpus)))
			}
			for i := range 30 {
				handlers.PodUpdated(nil, withCPU(fmt.Sprint("pending-", i), "", 8, 4))
			}
			if !e.changed.Load() {
				t.Error("a new outlook isn't due")
			}
			e.changed.Store(false)
			for i := range 30 {
				name := fmt.Sprint("placed-", i)
				handlers.PodUpdated(withCPU(name, "", 8, 4), withCPU(name, "gone", 8, 4))
			}
			if !e.changed.Load() {
				t.Error("a new outlook isn't due after pods that had come before were placed")
			}
			noneEnds(e) // So that emptiness doesn't count.
			other := withCPU("other", "n2", 0, 62)
			handlers.PodUpdated(nil, other)
			e.expect()
			best := func(pod string) string {
				t.Helper()
				asking := fake.Pod(pod, 8)
				passed := f.filter(asking, nodes...).Names()
				scores, err := f.Prioritize(asking, nodes)
				if err != nil || few > 0 && len(passed) != len(nodes) {
					t.Fatalf("%q pass (%v)", passed, err)
				}
				chosen := nodes[slices.Index(scores, placement.MaxScore)]
				if few == 0 && passed[0] != chosen {
					t.Errorf("filter passes %q, prioritize scores %v", passed, scores)
				}
				return chosen
			}
			if got := best("first"); got != "n2" {
				t.Errorf("the pod goes to %s, want the node without CPU", got)
			}
			handlers.PodDeleted(other)
			handlers.PodUpdated(nil, withCPU("another", "n3", 0, 62))
			if got := best("second"); got != "n3" {
				t.Errorf("the pod goes to %s, want the node that has no CPU now", got)
			}
		}))
	}
}

// TestExplainStranded: an explanation has the nodes whose memory is of no use, if pods are expected.
func TestExplainStranded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, policy := range []placement.Policy{placement.LeastWaste, placement.Binpack} {
			f := startCache(t, Options{FilterBest: 1})
			f.NodePolicy = policy
			handlers, e := (*eventHandlers)(f.Scheduler), f.newExpectations()
			f.expectations = e
			handlers.NodeUpdated(framework.MakeNode("n1").Cards(1, 16).Obj())
			handlers.PodUpdated(nil, clustercache.NewPodInfo(fake.Pod("wants-cpu", 8, fake.CPU(4))))
			handlers.PodUpdated(nil, clustercache.NewPodInfo(fake.Pod("takes-cpu", 0, fake.On("n1"), fake.CPU(62))))
			if e != nil {
				e.expect()
			}
			var texts []string
			for _, node := range f.Explain().Stranded.Nodes {
				texts = append(texts, node.Name+": "+node.Text(node.Unit))
			}
			var want []string
			if policy.NeedsOutlook() {
				want = []string{"n1: 16 MiB free, of no use: the node lacks CPU"}
			}
			if !slices.Equal(texts, want) {
				t.Errorf("by cost %v: %q, want %q", policy.NeedsOutlook(), texts, want)
			}
		}
	})
}

// noneEnds counts pods that are placed while none ends. At the start as many are expected to end as are placed.
func noneEnds(e *expectations) {
	for range 10000 {
		e.arrivals.Place()
	}
}

// TestExpectIfDue: a leader makes a new outlook after a change, and a standby only each minute.
func TestExpectIfDue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := startCache(t, Options{FilterBest: 1})
		f.NodePolicy = placement.LeastWaste
		for _, leads := range []bool{true, false} {
			e := f.newExpectations()
			e.leading = func() error {
				if leads {
					return nil
				}
				return errors.New("a standby")
			}
			for i, tc := range []struct {
				after   time.Duration
				changes bool
				makes   bool
			}{
				{0, false, true}, {time.Second, false, false}, {time.Second, true, leads}, {time.Second, false, false}, {time.Minute, false, true},
			} {
				f.clock.Step(tc.after)
				if tc.changes {
					e.expectSoon()
				}
				former := e.made
				e.expectIfDue(t.Context())
				if makes := e.made != former; makes != tc.makes {
					t.Errorf("leads: %v, step %d: makes an outlook: %v", leads, i, makes)
				}
			}
		}
	})
}

// TestTurnover: a pod that uses cards counts once when it gets its node, if that wasn't before the start, and once when it ends.
func TestTurnover(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := startCache(t, Options{FilterBest: 1})
		f.NodePolicy = placement.LeastWaste
		handlers, e := (*eventHandlers)(f.Scheduler), f.newExpectations()
		f.expectations = e
		noneEnds(e)
		pod := func(node string, request int64, phase corev1.PodPhase) *clustercache.PodInfo {
			return clustercache.NewPodInfo(fake.Pod("p", request, fake.On(node), fake.Phase(phase)))
		}
		pending, running, ended := pod("", 8, corev1.PodPending), pod("n1", 8, corev1.PodRunning), pod("n1", 8, corev1.PodSucceeded)
		other := *pending
		other.UID = "other"
		for name, tc := range map[string]struct {
			change func()
			want   int // The turnover grows if it is 1, and falls if it is -1.
		}{
			"a pod comes":                          {func() { handlers.PodUpdated(nil, pending) }, 0},
			"it gets its node":                     {func() { handlers.PodUpdated(pending, running) }, -1},
			"it changes further":                   {func() { handlers.PodUpdated(running, running) }, 0},
			"it ends":                              {func() { handlers.PodUpdated(running, ended) }, 1},
			"it is deleted":                        {func() { handlers.PodDeleted(running) }, 1},
			"it is deleted when it has ended":      {func() { handlers.PodDeleted(ended) }, 0},
			"a pending pod is deleted":             {func() { handlers.PodDeleted(pending) }, 0},
			"a pod that has its node at the start": {func() { handlers.PodUpdated(nil, running) }, 0},
			"a pod without GPU memory gets a node": {func() { handlers.PodUpdated(pod("", 0, corev1.PodPending), pod("n1", 0, corev1.PodRunning)) }, 0},
			"a pod without GPU memory is deleted":  {func() { handlers.PodDeleted(pod("n1", 0, corev1.PodRunning)) }, 0},
			"a pod that has ended changes further": {func() { handlers.PodUpdated(ended, ended) }, 0},
			"another pod has its name":             {func() { handlers.PodUpdated(running, &other) }, 1},
		} {
			before := e.arrivals.Turnover()
			tc.change()
			if got := cmp.Compare(e.arrivals.Turnover(), before); got != tc.want {
				t.Errorf("%s: the turnover changes by %d, want %d", name, got, tc.want)
			}
		}
	})
}

// TestWaitsForRoom: which pods count as waiting for room, and that each counts once and no longer than it waits.
func TestWaitsForRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := startCache(t, Options{FilterBest: 1})
		f.NodePolicy = placement.LeastWaste
		handlers, e := (*eventHandlers)(f.Scheduler), f.newExpectations()
		f.expectations = e
		pod := func(changes ...fake.PodEdit) *clustercache.PodInfo {
			return clustercache.NewPodInfo(fake.Pod("p", 8, changes...))
		}
		unschedulable := func(pod *corev1.Pod) {
			pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
		}
		gated := func(pod *corev1.Pod) { pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "other"}} }
		fresh, rejected, bound := pod(), pod(unschedulable), pod(fake.On("n1"))
		for _, tc := range []struct {
			name   string
			change func()
			want   int
		}{
			{"a pod that kube-scheduler hasn't tried", func() { handlers.PodUpdated(nil, fresh) }, 0},
			{"it is rejected", func() { handlers.PodUpdated(fresh, rejected) }, 1},
			{"it is rejected again", func() { handlers.PodUpdated(rejected, rejected) }, 1},
			{"it is bound", func() { handlers.PodUpdated(rejected, bound) }, 0},
			{"it is deleted", func() { handlers.PodDeleted(bound) }, 0},
			{"one waits at the start", func() { handlers.PodUpdated(nil, rejected) }, 1},
			{"it is deleted while it waits", func() { handlers.PodDeleted(rejected) }, 0},
			{"a gate of others keeps it", func() { handlers.PodUpdated(nil, pod(unschedulable, gated)) }, 0},
		} {
			tc.change()
			if kinds := e.arrivals.Kinds(); len(kinds) != 1 || kinds[0].Waiting != tc.want {
				t.Errorf("%s: kinds %+v, want %d that wait", tc.name, kinds, tc.want)
			}
		}
	})
}

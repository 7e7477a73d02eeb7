package eviction

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

func TestSurvey(t *testing.T) {
	type (
		objects = []runtime.Object
		uids    = []gpu.PodUID
		edits   = []fake.PodEdit
	)
	// The node n1 has two cards of 16, 8 CPUs and room for 10 pods. The preemptor, of priority 5, asks for 16.
	node := fake.Node("n1", 16, 16)
	node.Status.Allocatable[corev1.ResourcePods] = fake.Amount("x", 10)["x"]
	// pod returns a pod on a card of n1, plain one that asks for no GPU memory.
	pod := func(name string, memory int64, card int, edits ...fake.PodEdit) *corev1.Pod {
		return fake.Pod(name, memory, append(edits, fake.Bound("n1", card))...)
	}
	plain := func(name string, edits ...fake.PodEdit) *corev1.Pod {
		return fake.Pod(name, 0, append(edits, fake.On("n1"))...)
	}
	nominee := func(cpus int64, priority int32) *corev1.Pod {
		return fake.Pod("nominee", 0, fake.CPU(cpus), fake.Nominated("n1"), fake.Priority(priority))
	}
	// full returns pods with 9 + 7 on each card. The edits are for the first of them.
	full := func(edits ...fake.PodEdit) objects {
		return objects{pod("a9", 9, 0, edits...), pod("a7", 7, 0), pod("b9", 9, 1), pod("b7", 7, 1)}
	}
	with := func(list objects, more ...runtime.Object) objects { return append(list, more...) }
	overdue, important := fake.Terminating(begin.Add(-24*time.Hour)), fake.Priority(5)
	lingers := func(pod *corev1.Pod) {
		fake.Terminating(begin.Add(30 * 24 * time.Hour))(pod)
		pod.DeletionGracePeriodSeconds = new(int64(30 * 24 * 60 * 60))
	}
	inPodGroup := func(pod *corev1.Pod) { pod.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: new("g")} }
	matchesAll, matchesNone := fake.Budget("all", "", 0), fake.Budget("none", "", 0)
	invalid, elsewhere := fake.Budget("invalid", "", 0), fake.Budget("elsewhere", "x", 0)
	matchesAll.Spec.Selector, matchesNone.Spec.Selector = &metav1.LabelSelector{}, nil
	invalid.Spec.Selector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: "?"}}}
	elsewhere.Namespace = "other"

	for name, test := range map[string]struct {
		objects   objects
		preemptor edits
		proposed  preemption.Victims
		podGroup  gang.PodGroup
		// want are the victims; nil if the node is no candidate.
		want       uids
		violations int
	}{
		"one card is freed":                     {objects: full(), proposed: preemption.Victims{Pods: uids{"uid-a9", "uid-b7"}}, want: uids{"uid-a7", "uid-a9"}},
		"pods of equal or higher priority stay": {objects: full(important), want: uids{"uid-b7", "uid-b9"}},
		"a budget allows no disruption":         {objects: with(full(fake.Label("x")), fake.Budget("x", "x", 0)), want: uids{"uid-b7", "uid-b9"}},
		"a budget allows a disruption":          {objects: with(full(fake.Label("x")), fake.Budget("x", "x", 1)), want: uids{"uid-a7", "uid-a9"}},
		"a budget has counted the pod":          {objects: with(full(fake.Label("x")), fake.Budget("x", "x", 0, "a9")), want: uids{"uid-a7", "uid-a9"}},
		"budgets that match no pod":             {objects: with(full(fake.Label("x")), matchesNone, invalid, elsewhere), want: uids{"uid-a7", "uid-a9"}},
		"a budget of all pods of the namespace": {objects: with(full(fake.Label("x")), matchesAll), want: uids{"uid-a7", "uid-a9"}, violations: 2},
		"two budgets, one allows no disruption": {objects: with(full(fake.Label("x")), fake.Budget("x", "x", 1), fake.Budget("y", "x", 0)), want: uids{"uid-b7", "uid-b9"}},
		"a budget that must be violated": {
			objects: objects{pod("a", 16, 0, fake.Label("x")), pod("b", 16, 1, important), fake.Budget("x", "x", 0)},
			want:    uids{"uid-a"}, violations: 1,
		},
		"pods that are terminating go first": {
			objects: objects{pod("a", 16, 0), pod("b", 16, 1, fake.Priority(3), fake.Terminating(begin))}, want: uids{"uid-b"},
		},
		"overdue pods free nothing": {
			objects:  objects{pod("a", 16, 0, overdue), pod("b", 16, 1)},
			proposed: preemption.Victims{Pods: uids{"uid-b"}}, want: uids{"uid-b"},
		},
		"pods that are deleted in a month free nothing": {
			objects:  objects{pod("a", 16, 0, lingers), pod("b", 16, 1, fake.Priority(3))},
			proposed: preemption.Victims{Pods: uids{"uid-b"}}, want: uids{"uid-b"},
		},
		"overdue pods free nothing if they are proposed": {
			objects:  objects{pod("a", 16, 0, overdue), pod("b", 16, 1)},
			proposed: preemption.Victims{Pods: uids{"uid-a"}}, want: uids{"uid-b"},
		},
		"a static pod is no victim": {
			objects:  objects{pod("a", 16, 0, fake.Mirror), pod("b9", 9, 1), pod("b7", 7, 1)},
			proposed: preemption.Victims{Pods: uids{"uid-b9", "uid-b7"}}, want: uids{"uid-b7", "uid-b9"},
		},
		"a static pod that is proposed frees no card": {
			objects:  objects{pod("a", 16, 0, fake.Mirror), pod("b", 16, 1, important)},
			proposed: preemption.Victims{Pods: uids{"uid-a"}},
		},
		"the proposed victim that has the CPUs": {
			objects:   with(full(), plain("busy", fake.CPU(7), fake.Priority(-1)), plain("idle", fake.CPU(1))),
			preemptor: edits{fake.CPU(4)},
			proposed:  preemption.Victims{Pods: uids{"uid-idle", "uid-b9", "uid-b7", "uid-busy"}, Violations: 3},
			want:      uids{"uid-a7", "uid-a9", "uid-busy"}, violations: 1, // It is unknown which of the four had a budget.
		},
		"pods that have ended use no CPUs": {
			objects:   with(full(), plain("busy", fake.CPU(7), fake.Phase(corev1.PodSucceeded)), plain("idle", fake.CPU(1))),
			preemptor: edits{fake.CPU(4)},
			proposed:  preemption.Victims{Pods: uids{"uid-idle"}}, want: uids{"uid-a7", "uid-a9"},
		},
		"a nominated pod of equal priority gets its CPUs first": {
			objects:   with(full(), nominee(7, 5), plain("busy", fake.CPU(4))),
			preemptor: edits{fake.CPU(1)},
			proposed:  preemption.Victims{Pods: uids{"uid-busy"}}, want: uids{"uid-a7", "uid-a9", "uid-busy"},
		},
		"a nominated pod of lower priority does not": {
			objects:   with(full(), nominee(7, 4), plain("busy", fake.CPU(4))),
			preemptor: edits{fake.CPU(1)},
			proposed:  preemption.Victims{Pods: uids{"uid-busy"}}, want: uids{"uid-a7", "uid-a9"},
		},
		"the number of pods": {
			objects:  with(full(), plain("c"), plain("d"), plain("e"), plain("f"), plain("g"), plain("h"), plain("i")),
			proposed: preemption.Victims{Pods: uids{"uid-h", "uid-i"}}, want: uids{"uid-a7", "uid-a9"},
		},
		"the proposed victim that has the host port": {
			objects:   with(full(), plain("web", fake.HostPort(80)), plain("other", fake.HostPort(81))),
			preemptor: edits{fake.HostPort(80)},
			proposed:  preemption.Victims{Pods: uids{"uid-web", "uid-other"}}, want: uids{"uid-a7", "uid-a9", "uid-web"},
		},
		"a presumed allocation may be on another card": {
			objects: objects{fake.Pod("presumed", 16, fake.On("n1")), pod("b9", 9, 1), pod("b7", 7, 1)}, want: uids{"uid-b7", "uid-b9"},
		},
		"a card that another pod is nominated to": {
			objects: objects{
				pod("a", 16, 0, fake.Terminating(begin)), pod("b", 16, 1), fake.Pod("nominee", 16, fake.Nominated("n1"), important),
			}, want: uids{"uid-b"},
		},
		"the priority of a PodGroup counts, not that of its pods": {
			objects: full(inPodGroup), podGroup: gang.PodGroup{Priority: 5}, want: uids{"uid-b7", "uid-b9"},
		},
		"pods of a PodGroup that are disrupted together stay unless they are proposed": {
			objects: full(inPodGroup), podGroup: gang.PodGroup{Together: true}, want: uids{"uid-b7", "uid-b9"},
		},
		"all of them are evicted if they are": {
			objects:  objects{pod("a9", 9, 0, inPodGroup), pod("a7", 7, 0), pod("b9", 9, 1, inPodGroup), pod("b7", 7, 1)},
			podGroup: gang.PodGroup{Together: true}, proposed: preemption.Victims{Pods: uids{"uid-a9", "uid-b9"}}, want: uids{"uid-a7", "uid-a9", "uid-b9"},
		},
		"kube-scheduler accepts no pod of another node": {
			objects:  with(full(inPodGroup), fake.Node("n2", 16), fake.Pod("far", 9, fake.Bound("n2", 0), inPodGroup)),
			podGroup: gang.PodGroup{Together: true}, proposed: preemption.Victims{Pods: uids{"uid-a9", "uid-far"}},
		},
		"no card can be freed": {
			objects:  objects{pod("a", 1, 0, important), pod("b", 1, 1, important), pod("c", 15, 0)},
			proposed: preemption.Victims{Pods: uids{"uid-c"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(append(test.objects, node)...)
			preemptor := clustercache.NewPodInfo(fake.Pod("p", 16, append(test.preemptor, important)...))
			podGroup := func(gpu.PodUID) (gang.PodGroup, bool) { return test.podGroup, true }
			answer, _ := NewSurvey(c.ledger, c, podGroup, preemptor, begin).Victims(t.Context(), map[string]preemption.Victims{"n1": test.proposed})
			got, ok := answer["n1"]
			want := preemption.Victims{Pods: test.want, Violations: test.violations}
			if ok != (test.want != nil) {
				t.Errorf("candidate: %v", ok)
			}
			check.Equal(t, "the result", want, got)
		})
	}
}

func TestSurveyNoCandidate(t *testing.T) {
	c := newCluster(fake.Node("assumed", 16), fake.Node("other", 16), fake.Node("own", 16), fake.Pod("victim", 16, fake.Bound("other", 0)))
	if _, err := c.ledger.Reserve("assumed", gpu.Pod{UID: "x", Request: 16}, placement.Binpack, begin); err != nil {
		t.Fatal(err)
	}
	tried := fake.Pod("tried", 16, fake.Priority(5))
	if _, err := c.ledger.Reserve("own", protocol.Pod(tried), placement.Binpack, begin); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		preemptor *corev1.Pod
		node      string
	}{
		"kube-scheduler may not know the pod of an assumed allocation": {fake.Pod("p", 16, fake.Priority(5)), "assumed"},
		"an unknown node": {fake.Pod("p", 16, fake.Priority(5)), "unknown"},
		"the preemptor has an unconfirmed bind to another node": {tried, "other"},
	} {
		proposed := map[string]preemption.Victims{test.node: {Pods: []gpu.PodUID{"uid-victim"}}}
		got, undecided := NewSurvey(c.ledger, c, nil, clustercache.NewPodInfo(test.preemptor), begin).Victims(t.Context(), proposed)
		if len(got) > 0 || undecided > 0 {
			t.Errorf("%s: victims %v, %d nodes undecided", name, got, undecided)
		}
	}
}

// A call that kube-scheduler no longer waits for decides no further node.
func TestSurveyEndsWithTheCall(t *testing.T) {
	c := newCluster(fake.Node("n1", 16), fake.Pod("victim", 16, fake.Bound("n1", 0)))
	survey := NewSurvey(c.ledger, c, nil, clustercache.NewPodInfo(fake.Pod("p", 16, fake.Priority(5))), begin)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	proposal := preemption.Victims{Pods: []gpu.PodUID{"uid-victim"}}
	got, undecided := survey.Victims(ctx, map[string]preemption.Victims{"n1": proposal, "n2": proposal})
	if len(got) > 0 || undecided != 2 {
		t.Errorf("victims %v, %d nodes undecided, want 2", got, undecided)
	}
}

// All pods of a namespace are matched with its budgets by labels, and once for equal labels.
func TestBudgetsOfEqualPods(t *testing.T) {
	b := newBudgets(newCluster(fake.Budget("b", "x", 0), fake.Budget("c", "y", 0)))
	for _, label := range []string{"x", "x", "y"} {
		b.of(clustercache.NewPodInfo(fake.Pod("p", 1, fake.On("n1"), fake.Label(label))))
	}
	if len(b.covering) != 2 {
		t.Errorf("pods with 2 labels were matched %d times", len(b.covering))
	}
}

package scheduling

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
)

type podEdit func(*corev1.Pod)

func edited(pod *corev1.Pod, edits ...podEdit) *corev1.Pod {
	for _, edit := range edits {
		edit(pod)
	}
	return pod
}

func priority(n int32) podEdit { return func(pod *corev1.Pod) { pod.Spec.Priority = &n } }

func label(app string) podEdit {
	return func(pod *corev1.Pod) { pod.Labels = map[string]string{"app": app} }
}

func cpu(n int64) podEdit {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Requests = amount(corev1.ResourceCPU, n)
	}
}

func hostPort(n int32) podEdit {
	return func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80}, {HostPort: n}}
	}
}

func at(node string) podEdit { return func(pod *corev1.Pod) { pod.Spec.NodeName = node } }

func nominated(node string) podEdit {
	return func(pod *corev1.Pod) { pod.Status.NominatedNodeName = node }
}

func phase(p corev1.PodPhase) podEdit { return func(pod *corev1.Pod) { pod.Status.Phase = p } }

func leaving(pod *corev1.Pod) { leavingSince(0)(pod) }

// leavingSince returns an edit that marks a pod as being deleted, with a grace period that ended the given time ago.
func leavingSince(over time.Duration) podEdit {
	return func(pod *corev1.Pod) {
		// Without a finalizer, a fake client deletes the pod at once.
		pod.DeletionTimestamp, pod.Finalizers = &metav1.Time{Time: begin.Add(-over)}, []string{"x/y"}
	}
}

func mirror(pod *corev1.Pod) { pod.Annotations[corev1.MirrorPodAnnotationKey] = "hash" }

// roomy returns a node with 8 CPUs that allows 10 pods.
func roomy(t *testing.T, name string, cards ...int64) *corev1.Node {
	node := newNode(t, name, cards...)
	node.Status.Allocatable = node.Status.Capacity.DeepCopy()
	node.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("8")
	node.Status.Allocatable[corev1.ResourcePods] = resource.MustParse("10")
	return node
}

func newBudget(name, app string, allowed int32, disrupted ...string) *policyv1.PodDisruptionBudget {
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
		Status:     policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed, DisruptedPods: map[string]metav1.Time{}},
	}
	for _, pod := range disrupted {
		budget.Status.DisruptedPods[pod] = metav1.Now()
	}
	return budget
}

func TestPreempt(t *testing.T) {
	// Two cards of 16, with 9 + 7 in use on each.
	full := func(edits ...podEdit) []runtime.Object {
		return []runtime.Object{
			edited(boundPod("a9", 9, "n1", 0), edits...), boundPod("a7", 7, "n1", 0),
			boundPod("b9", 9, "n1", 1), boundPod("b7", 7, "n1", 1),
		}
	}
	with := func(objects []runtime.Object, more ...runtime.Object) []runtime.Object {
		return append(objects, more...)
	}
	type uids = []gpu.PodUID
	matchesAll := newBudget("all", "", 0)
	matchesAll.Spec.Selector = &metav1.LabelSelector{}
	broken := newBudget("broken", "", 0)
	broken.Spec.Selector = &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "app", Operator: "?"}}}
	elsewhere := newBudget("elsewhere", "x", 0)
	elsewhere.Namespace = "other"

	tests := map[string]struct {
		objects  []runtime.Object
		pod      []podEdit
		proposed preemption.Victims
		want     uids
		breaks   int
	}{
		"one card is freed":                       {objects: full(), proposed: preemption.Victims{Pods: uids{"uid-a9", "uid-b7"}}, want: uids{"uid-a7", "uid-a9"}},
		"pods of equal or higher priority stay":   {objects: full(priority(5)), want: uids{"uid-b7", "uid-b9"}},
		"a budget counts":                         {objects: with(full(label("x")), newBudget("x", "x", 0)), want: uids{"uid-b7", "uid-b9"}},
		"a budget that allows it":                 {objects: with(full(label("x")), newBudget("x", "x", 1)), want: uids{"uid-a7", "uid-a9"}},
		"a budget that has counted the pod":       {objects: with(full(label("x")), newBudget("x", "x", 0, "a9")), want: uids{"uid-a7", "uid-a9"}},
		"budgets that match nothing":              {objects: with(full(label("x")), matchesAll, broken, elsewhere), want: uids{"uid-a7", "uid-a9"}},
		"two budgets, one of which doesn't allow": {objects: with(full(label("x")), newBudget("x", "x", 1), newBudget("y", "x", 0)), want: uids{"uid-b7", "uid-b9"}},
		"a budget that must be broken": {
			objects: with([]runtime.Object{edited(boundPod("a", 16, "n1", 0), label("x")), edited(boundPod("b", 16, "n1", 1), priority(5))}, newBudget("x", "x", 0)),
			want:    uids{"uid-a"}, breaks: 1,
		},
		"pods that leave anyway": {objects: []runtime.Object{
			boundPod("a", 16, "n1", 0), edited(boundPod("b", 16, "n1", 1), priority(3), leaving),
		}, want: uids{"uid-b"}},
		"pods that should have left long ago free nothing": {
			objects: []runtime.Object{
				edited(boundPod("a", 16, "n1", 0), leavingSince(24*time.Hour)), boundPod("b", 16, "n1", 1),
			},
			proposed: preemption.Victims{Pods: uids{"uid-b"}}, want: uids{"uid-b"},
		},
		"even where they are proposed": {
			objects: []runtime.Object{
				edited(boundPod("a", 16, "n1", 0), leavingSince(24*time.Hour)), boundPod("b", 16, "n1", 1),
			},
			proposed: preemption.Victims{Pods: uids{"uid-a"}}, want: uids{"uid-b"},
		},
		"a static pod is left alone": {
			objects:  []runtime.Object{edited(boundPod("a", 16, "n1", 0), mirror), boundPod("b9", 9, "n1", 1), boundPod("b7", 7, "n1", 1)},
			proposed: preemption.Victims{Pods: uids{"uid-b9", "uid-b7"}}, want: uids{"uid-b7", "uid-b9"},
		},
		"a static pod that is proposed frees no card": {
			objects:  []runtime.Object{edited(boundPod("a", 16, "n1", 0), mirror), edited(boundPod("b", 16, "n1", 1), priority(5))},
			proposed: preemption.Victims{Pods: uids{"uid-a"}},
		},
		"CPU keeps the proposed victim that has it": {
			objects:  with(full(), edited(newPod("busy", 0), cpu(7), at("n1"), priority(-1)), edited(newPod("idle", 0), cpu(1), at("n1"))),
			pod:      []podEdit{cpu(4)},
			proposed: preemption.Victims{Pods: uids{"uid-idle", "uid-b9", "uid-b7", "uid-busy"}, Violations: 3},
			want:     uids{"uid-a7", "uid-a9", "uid-busy"}, breaks: 1, // It is unknown which of the four had a budget.
		},
		"CPU that pods had which have ended": {
			objects:  with(full(), edited(newPod("busy", 0), cpu(7), at("n1"), phase(corev1.PodSucceeded)), edited(newPod("idle", 0), cpu(1), at("n1"))),
			pod:      []podEdit{cpu(4)},
			proposed: preemption.Victims{Pods: uids{"uid-idle"}}, want: uids{"uid-a7", "uid-a9"},
		},
		"CPU that a nominated pod of equal priority is to get": {
			objects:  with(full(), edited(newPod("waits", 0), cpu(7), nominated("n1"), priority(5)), edited(newPod("busy", 0), cpu(4), at("n1"))),
			pod:      []podEdit{cpu(1)},
			proposed: preemption.Victims{Pods: uids{"uid-busy"}}, want: uids{"uid-a7", "uid-a9", "uid-busy"},
		},
		"CPU that a nominated pod of lower priority is to get": {
			objects:  with(full(), edited(newPod("waits", 0), cpu(7), nominated("n1"), priority(4)), edited(newPod("busy", 0), cpu(4), at("n1"))),
			pod:      []podEdit{cpu(1)},
			proposed: preemption.Victims{Pods: uids{"uid-busy"}}, want: uids{"uid-a7", "uid-a9"},
		},
		"a place among the node's pods": {
			objects: with(full(), edited(newPod("c", 0), at("n1")), edited(newPod("d", 0), at("n1")), edited(newPod("e", 0), at("n1")),
				edited(newPod("f", 0), at("n1")), edited(newPod("g", 0), at("n1")), edited(newPod("h", 0), at("n1")), edited(newPod("i", 0), at("n1"))),
			proposed: preemption.Victims{Pods: uids{"uid-h", "uid-i"}}, want: uids{"uid-a7", "uid-a9"},
		},
		"a port keeps the victim that has it": {
			objects:  with(full(), edited(newPod("web", 0), hostPort(80), at("n1")), edited(newPod("other", 0), hostPort(81), at("n1"))),
			pod:      []podEdit{hostPort(80)},
			proposed: preemption.Victims{Pods: uids{"uid-web", "uid-other"}}, want: uids{"uid-a7", "uid-a9", "uid-web"},
		},
		"a pod whose card is unknown can't free one": {objects: []runtime.Object{
			edited(newPod("presumed", 16), at("n1")), boundPod("b9", 9, "n1", 1), boundPod("b7", 7, "n1", 1),
		}, want: uids{"uid-b7", "uid-b9"}},
		"a card of which another pod waits for the victims": {
			objects: []runtime.Object{
				edited(boundPod("a", 16, "n1", 0), leaving), boundPod("b", 16, "n1", 1), edited(newPod("waits", 16), nominated("n1"), priority(5)),
			}, want: uids{"uid-b"},
		},
		"no card can be freed": {objects: []runtime.Object{
			edited(boundPod("a", 1, "n1", 0), priority(5)), edited(boundPod("b", 1, "n1", 1), priority(5)), boundPod("c", 15, "n1", 0),
		}, proposed: preemption.Victims{Pods: uids{"uid-c"}}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			f := start(t, patient, append(test.objects, roomy(t, "n1", 16, 16))...)
			preemptor := edited(newPod("p", 16), append(test.pod, priority(5))...)
			got, err := f.Preempt(t.Context(), preemptor, map[string]preemption.Victims{"n1": test.proposed})
			if err != nil {
				t.Fatal(err)
			}
			want := map[string]preemption.Victims{}
			if test.want != nil {
				want["n1"] = preemption.Victims{Pods: test.want, Violations: test.breaks}
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestPreemptLeavesOthersAlone(t *testing.T) {
	f := start(t, patient, roomy(t, "n1", 16), roomy(t, "n2", 16), boundPod("a", 16, "n1", 0), boundPod("b", 16, "n2", 0))
	both := map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-a"}}, "n2": {Pods: []gpu.PodUID{"uid-b"}}}
	preempt := func(pod *corev1.Pod) map[string]preemption.Victims {
		t.Helper()
		got, err := f.Preempt(t.Context(), pod, both)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if got := preempt(edited(newPod("p", 0), priority(5))); !cmp.Equal(got, both) {
		t.Errorf("a pod that asks for no GPU memory: %v", got)
	}
	never := corev1.PreemptNever
	if got := preempt(edited(newPod("p", 16), priority(5), func(pod *corev1.Pod) { pod.Spec.PreemptionPolicy = &never })); len(got) != 0 {
		t.Errorf("a pod that is never to preempt: %v", got)
	}
	// A pod with an unconfirmed bind may already be on its node.
	if got := preempt(edited(boundPod("a", 16, "n1", 0), priority(5))); !cmp.Equal(got, map[string]preemption.Victims{"n1": both["n1"]}) {
		t.Errorf("a pod that holds a card: %v", got)
	}
	// For a pod with an in-flight bind, kube-scheduler may not know that it is on the node.
	if _, err := f.ledger.Reserve("n3", gpu.Pod{}, placement.Binpack, f.clock.Now()); err == nil {
		t.Error("an unknown node took a pod")
	}
	f.ledger.Remove("uid-b")
	if _, err := f.ledger.Reserve("n2", gpu.Pod{UID: "uid-r", Request: 16}, placement.Binpack, f.clock.Now()); err != nil {
		t.Fatal(err)
	}
	if got := preempt(edited(newPod("p", 16), priority(5))); !cmp.Equal(got, map[string]preemption.Victims{"n1": both["n1"]}) {
		t.Errorf("beside a reservation: %v", got)
	}
}

func TestPreemptWaitsForTheDisruptionBudgets(t *testing.T) {
	f := start(t, patient, roomy(t, "n1", 16))
	f.sync.budgets = func() bool { return false }
	_, err := f.Preempt(t.Context(), newPod("p", 16), nil)
	if !errors.Is(err, ErrNotReady) || f.Ready() != nil {
		t.Errorf("%v; everything else is ready: %v", err, f.Ready())
	}
}

func TestNominatedPodsAreKnownFromTheWatch(t *testing.T) {
	nominee := edited(newPod("nominee", 16), priority(5), nominated("n1"))
	f := start(t, patient, roomy(t, "n1", 16), roomy(t, "n2", 16), nominee)
	others := protocol.Pod(newPod("x", 1))
	check := func() (out [2]bool) { return [2]bool{f.fits(others, "n1"), f.fits(others, "n2")} }
	if got := check(); got != [2]bool{false, true} {
		t.Fatalf("nominated to n1: %v", got)
	}
	awaitRoom := func(want [2]bool) {
		t.Helper()
		f.await("room", func() bool { return check() == want })
	}
	nominee.Status.NominatedNodeName = "n2"
	f.publishObject(nominee)
	awaitRoom([2]bool{true, false})
	nominee.Status.NominatedNodeName = ""
	f.publishObject(nominee)
	awaitRoom([2]bool{true, true})
	nominee.Status.NominatedNodeName = "n1"
	f.publishObject(nominee)
	awaitRoom([2]bool{false, true})

	// Once bound to another node, it has only that allocation.
	bound := boundPod("nominee", 16, "n2", 0)
	bound.Status.NominatedNodeName = "n1"
	f.publishObject(bound)
	awaitRoom([2]bool{true, false})
	f.publishGone(bound)
	awaitRoom([2]bool{true, true})

	f.publishObject(nominee)
	awaitRoom([2]bool{false, true})
	f.publishGone(nominee)
	awaitRoom([2]bool{true, true})
}

func TestBindLeavesTheRoomOfNominatedPods(t *testing.T) {
	pod := edited(newPod("p", 10), priority(5))
	f := start(t, patient, roomy(t, "n1", 16), edited(newPod("nominee", 16), priority(5), nominated("n1")), pod)
	if err := f.bind(pod); !errors.Is(err, ledger.ErrNoRoom) {
		t.Errorf("%v, want no room", err)
	}
}

func TestInterferes(t *testing.T) {
	antiAffinity := func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: "x"}},
		}}
	}
	preferred := func(pod *corev1.Pod) {
		pod.Spec.Affinity = &corev1.Affinity{
			PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: "x"}}},
			PodAntiAffinity: &corev1.PodAntiAffinity{
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{Weight: 1}},
			},
		}
	}
	spread := func(action corev1.UnsatisfiableConstraintAction) podEdit {
		return func(pod *corev1.Pod) {
			pod.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: action}}
		}
	}
	volume := func(source corev1.VolumeSource) podEdit {
		return func(pod *corev1.Pod) {
			pod.Spec.Volumes = append(pod.Spec.Volumes, corev1.Volume{VolumeSource: source})
		}
	}
	claim := volume(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}})
	config := volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}})
	device := func(pod *corev1.Pod) { pod.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "r"}} }
	port := func(number int32, protocol corev1.Protocol, ip string) podEdit {
		return func(pod *corev1.Pod) {
			pod.Spec.Containers[0].Ports = []corev1.ContainerPort{{HostPort: number, Protocol: protocol, HostIP: ip}}
		}
	}
	sidecarPort := func(restart corev1.ContainerRestartPolicy) podEdit {
		return func(pod *corev1.Pod) {
			pod.Spec.InitContainers = []corev1.Container{{RestartPolicy: &restart, Ports: []corev1.ContainerPort{{HostPort: 80}}}}
		}
	}
	type edits = []podEdit
	for name, test := range map[string]struct {
		pod, preemptor edits
		want           bool
	}{
		"plain pods":                                 {},
		"the pod keeps others off":                   {pod: edits{antiAffinity}, want: true},
		"the preemptor keeps others off":             {preemptor: edits{antiAffinity}, want: true},
		"wishes":                                     {pod: edits{preferred}, preemptor: edits{preferred}},
		"the preemptor must be spread":               {preemptor: edits{spread(corev1.DoNotSchedule)}, want: true},
		"the preemptor wishes to be spread":          {preemptor: edits{spread(corev1.ScheduleAnyway)}},
		"the pod is spread, which is its own affair": {pod: edits{spread(corev1.DoNotSchedule)}},
		"volumes of both":                            {pod: edits{config, claim}, preemptor: edits{claim}, want: true},
		"a volume of one":                            {pod: edits{claim}, preemptor: edits{config}},
		"a volume of the other":                      {pod: edits{config}, preemptor: edits{claim}},
		"devices of both":                            {pod: edits{device}, preemptor: edits{device}, want: true},
		"a device of one":                            {pod: edits{device}},
		"the same port":                              {pod: edits{port(80, "", "")}, preemptor: edits{port(80, "TCP", "0.0.0.0")}, want: true},
		"another protocol":                           {pod: edits{port(80, "", "")}, preemptor: edits{port(80, "UDP", "")}},
		"another port":                               {pod: edits{port(80, "", "")}, preemptor: edits{port(81, "", "")}},
		"another address":                            {pod: edits{port(80, "", "10.0.0.1")}, preemptor: edits{port(80, "", "10.0.0.2")}},
		"the same address":                           {pod: edits{port(80, "", "10.0.0.1")}, preemptor: edits{port(80, "", "10.0.0.1")}, want: true},
		"any address":                                {pod: edits{port(80, "", "10.0.0.1")}, preemptor: edits{port(80, "", "")}, want: true},
		"a sidecar's port":                           {pod: edits{sidecarPort(corev1.ContainerRestartPolicyAlways)}, preemptor: edits{port(80, "", "")}, want: true},
		"the port of a step that has passed":         {pod: edits{sidecarPort(corev1.ContainerRestartPolicyNever)}, preemptor: edits{port(80, "", "")}},
	} {
		t.Run(name, func(t *testing.T) {
			for _, memory := range []int64{0, 5} { // The cache keeps less of pods that ask for no GPU memory.
				preemptor := edited(newPod("p", 16), test.preemptor...)
				pod := slimmed(t, new(slimmer), edited(newPod("v", memory), test.pod...))
				if got := interferes(&pod.Spec, &preemptor.Spec); got != test.want {
					t.Errorf("%v for a pod with %d, want %v", got, memory, test.want)
				}
			}
		})
	}
}

func TestWhatManyPodsHaveInCommonIsKeptOnce(t *testing.T) {
	s := new(slimmer)
	keep := func(name string, memory, cpus int64, labels string) *packed {
		return s.pack(s.pod(edited(boundPod(name, memory, "n1", 3), cpu(cpus), label(labels))))
	}
	a, b, c := keep("a", 16, 1, "x"), keep("b", 17, 1, "x"), keep("c", 16, 2, "y")
	if a.rest != b.rest {
		t.Error("what pods of other names and sizes have in common is kept twice")
	}
	if a.rest == c.rest || c.Labels["app"] != "y" {
		t.Error("different pods are taken for equal")
	}
	for i := range int64(maxShared + 10) {
		keep("p", 16, i, "x")
	}
	if n := len(s.rests.values); n > maxShared {
		t.Errorf("%d shapes are remembered", n)
	}
	before, _ := podOf(a)
	after, _ := podOf(keep("a", 16, 1, "x"))
	if diff := cmp.Diff(before, after, cmp.Comparer(resource.Quantity.Equal)); diff != "" {
		t.Errorf("forgetting changed:\n%s", diff)
	}
}

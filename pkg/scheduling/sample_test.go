package scheduling

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/apiserver/fake"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
)

// sampledOptions are those of an extender to which kube-scheduler offers samples of two nodes.
var sampledOptions = Options{SmallestSample: 2, FilterBest: 1, FilterBestAbove: 32}

// sampledCluster has a pod that fits neither n1 nor n2 unless a pod is evicted there, and n3, which has no pod.
func sampledCluster(pod *corev1.Pod, more ...runtime.Object) []runtime.Object {
	return append(more, pod, fake.Node("n1", 16), fake.Node("n2", 16), fake.Node("n3", 16),
		fake.Pod("old-1", 12, fake.Bound("n1", 0)), fake.Pod("old-2", 12, fake.Bound("n2", 0)))
}

// sampledCycle is a cycle of kube-scheduler: filter rejects both nodes of the sample, and preempt is called.
func (f *fixture) sampledCycle(pod *corev1.Pod) map[string]preemption.Victims {
	f.t.Helper()
	result, err := f.Filter(pod, []string{"n1", "n2"})
	if err != nil || len(result.Passed) > 0 {
		f.t.Fatalf("filter passes %v, %v", result.Names(), err)
	}
	victims, err := f.Preempt(f.t.Context(), pod, map[string]preemption.Victims{"n1": {Pods: []gpu.PodUID{"uid-old-1"}}})
	if err != nil {
		f.t.Fatal(err)
	}
	return victims
}

// TestSample: a pod whose room is outside the sample evicts no pod, is nominated to the node that has room, and is requeued after
// that.
func TestSample(t *testing.T) {
	pod := fake.Pod("p", 8, fake.Priority(5))
	f := start(t, sampledOptions, sampledCluster(pod)...)
	if victims := f.sampledCycle(pod); victims != nil {
		t.Errorf("preemption of %v", victims)
	}
	f.pass("the requeue at the start", func() bool { return len(f.server.Calls().Annotated) == 1 })
	f.pass("the nomination", func() bool { return len(f.server.Calls().Nominated) > 0 })
	if diff := cmp.Diff([]string{"p=n3"}, f.server.Calls().Nominated); diff != "" {
		t.Errorf("nominations (-want +got):\n%s", diff)
	}
	f.pass("the requeue after it", func() bool { return len(f.server.Calls().Annotated) == 2 })
}

// TestSampleIsAll: pods for which a node outside the sample is no help are treated as if the sample were all nodes.
func TestSampleIsAll(t *testing.T) {
	onlyFirst := func(pod *corev1.Pod) { pod.Spec.NodeSelector = map[string]string{"pool": "first"} }
	first := fake.Node("n1", 16)
	first.Labels = map[string]string{"pool": "first"}
	for name, test := range map[string]struct {
		options Options
		pod     *corev1.Pod
		more    []runtime.Object
	}{
		"kube-scheduler offers all nodes": {Options{}, fake.Pod("p", 8, fake.Priority(5)), nil},
		"no other node has room": {sampledOptions, fake.Pod("p", 8, fake.Priority(5)), []runtime.Object{
			fake.Pod("old-3", 12, fake.Bound("n3", 0)),
		}},
		"the pod can't use the node": {sampledOptions, fake.Pod("p", 8, fake.Priority(5), onlyFirst), nil},
		"kube-scheduler has rejected the node": {sampledOptions, fake.Pod("p", 8, fake.Priority(5), func(pod *corev1.Pod) {
			pod.Status.NominatedNodeName = "n3"
		}), nil},
	} {
		t.Run(name, func(t *testing.T) {
			f := start(t, test.options, sampledCluster(test.pod, test.more...)...)
			if victims := f.sampledCycle(test.pod); len(victims) != 1 {
				t.Errorf("victims %v, want the pod on n1", victims)
			}
		})
	}
}

// TestSampleGivesUp: if nominations don't help a pod, kube-scheduler knows of a reason that is unknown here, and may evict pods for it.
func TestSampleGivesUp(t *testing.T) {
	pod := fake.Pod("p", 8, fake.Priority(5))
	f := start(t, sampledOptions, sampledCluster(pod)...)
	f.pass("the preemption", func() bool { return f.sampledCycle(pod) != nil })
	if n := len(f.server.Calls().Nominated); n == 0 || n > 3 {
		t.Errorf("%d nominations, want one to three before the preemption", n)
	}
}

// TestSampleOfMember: the plan of a group uses all nodes. A member whose place is outside the sample is nominated to it.
func TestSampleOfMember(t *testing.T) {
	o := sampledOptions
	o.Gangs = GangOptions{Hold: 10 * time.Second, Patience: 30 * time.Second, Observer: &fake.Observer{}}
	a, b := member(2, 0), member(2, 1)
	f := start(t, o, sampledCluster(a, b)...)
	for _, pod := range []*corev1.Pod{a, b} {
		f.pass("the member's place", func() bool {
			result, err := f.Filter(pod, []string{"n1", "n2"})
			if err != nil || len(result.Passed) > 0 {
				t.Fatalf("filter passes %v, %v", result.Names(), err)
			}
			return result.Message == gang.OutsideSample.Text
		})
	}
	f.pass("the nominations", func() bool { return len(f.server.Calls().Nominated) == 2 })
	for _, pod := range []*corev1.Pod{a, b} {
		pod.Status.NominatedNodeName = "n3"
		result, err := f.Filter(pod, []string{"n3"})
		if diff := cmp.Diff([]string{"n3"}, result.Names()); diff != "" || err != nil {
			t.Errorf("filter of the nominated node: %v (-want +got)\n%s", err, diff)
		}
	}
}

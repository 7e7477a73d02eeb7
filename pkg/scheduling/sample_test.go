package scheduling

import (
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// sampledOptions are those of an extender to which kube-scheduler offers samples of two nodes.
var sampledOptions = Options{SampleSize: func(int) int { return 2 }, minSample: 2, FilterBest: 1, FilterBestAbove: 32}

// sampledCluster has a pod that fits neither n1 nor n2 unless a pod is evicted there, and n3, which has no pod.
func sampledCluster(pod *corev1.Pod, more ...runtime.Object) []runtime.Object {
	empty := fake.Node("n3", 16)
	empty.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("4")
	return append(more, pod, fake.Node("n1", 16), fake.Node("n2", 16), empty,
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
	check.Must(f.t, err)
	return victims
}

// A pod is evicted for no pod that fits a node outside the sample which has just become eligible.
func TestSampleAfterNodeChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		open := fake.Node("n4", 16)
		open.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("4")
		closed := open.DeepCopy()
		closed.Spec.Unschedulable = true
		pod := fake.Pod("p", 16, fake.Priority(5))
		f := start(t, sampledOptions, sampledCluster(pod, closed, fake.Pod("old-3", 12, fake.Bound("n3", 0)))...)
		if names := f.nodes.UsableNodes(clustercache.NewPodInfo(pod).Constraints); len(names) != 3 {
			t.Fatalf("eligible are %v", names)
		}
		f.publishNode(open)
		if victims := f.sampledCycle(pod); victims != nil {
			t.Errorf("preemption of %v", victims)
		}
	})
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
		"the pod's node depends on other pods": {sampledOptions, fake.Pod("p", 8, fake.Priority(5), func(pod *corev1.Pod) {
			pod.Spec.Containers[0].Ports = []corev1.ContainerPort{{HostPort: 80}}
		}), nil},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			f := start(t, test.options, sampledCluster(test.pod, test.more...)...)
			if victims := f.sampledCycle(test.pod); len(victims) != 1 {
				t.Errorf("victims %v, want the pod on n1", victims)
			}
		}))
	}
}

// TestSampleOfPodThatNeverPreempts: it isn't nominated, since kube-scheduler wouldn't end the nomination. It is requeued for the next sample.
func TestSampleOfPodThatNeverPreempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 8, func(pod *corev1.Pod) { pod.Spec.PreemptionPolicy = new(corev1.PreemptNever) })
		f := start(t, sampledOptions, sampledCluster(pod)...)
		f.pass("the requeue at the start", func() bool { return len(f.server.Calls().Annotated) == 1 })
		f.sampledCycle(pod)
		if f.nominator.Requested(gpu.PodUID(pod.UID)) {
			t.Error("it is about to be nominated")
		}
		f.pass("the requeue", func() bool { return len(f.server.Calls().Annotated) == 2 })
		if got := f.server.Calls().Nominated; len(got) > 0 {
			t.Errorf("nominations %q", got)
		}
	})
}

// take gives most of the node's memory to another pod.
func (f *fixture) take(node string) {
	f.t.Helper()
	if _, err := f.ledger.Reserve(node, gpu.Pod{UID: "other", Priority: 9, Request: 12}, f.CardPolicy, f.clock.Now()); err != nil {
		f.t.Fatal(err)
	}
}

// TestSampleGivesUp: if a pod isn't nominated, or kube-scheduler rejects the node, the pod is requeued, and pods may be evicted for it.
func TestSampleGivesUp(t *testing.T) {
	for name, meddle := range map[string]func(f *fixture){
		"another pod takes the room": func(f *fixture) { f.take("n3") },
		"the nomination is not written": func(f *fixture) {
			f.server.Answer(fake.Answers{Nominate: errForbidden})
		},
		"the watch doesn't show the nomination": func(*fixture) {},
	} {
		t.Run(name, bubble(func(t *testing.T) {
			pod := fake.Pod("p", 8, fake.Priority(5))
			f := start(t, sampledOptions, sampledCluster(pod)...)
			f.pass("the requeue at the start", func() bool { return len(f.server.Calls().Annotated) == 1 })
			if victims := f.sampledCycle(pod); victims != nil {
				t.Errorf("preemption of %v", victims)
			}
			meddle(f)
			f.pass("a requeue", func() bool { return len(f.server.Calls().Annotated) > 1 })
			f.pass("the preemption", func() bool { return f.sampledCycle(pod) != nil })
		}))
	}
}

// TestSampleLacksCPU: a node outside the sample that has a card and no CPU has no room. So pods may be evicted for the pod at once.
func TestSampleLacksCPU(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := fake.Pod("p", 8, fake.Priority(5), fake.CPU(1000))
		f := start(t, sampledOptions, sampledCluster(pod)...)
		if victims := f.sampledCycle(pod); victims == nil {
			t.Error("no preemption")
		}
	})
}

// TestSampleRefused: kube-scheduler rejects the node to which the pod was nominated, unless filter itself did because the room was taken.
func TestSampleRefused(t *testing.T) {
	for name, test := range map[string]struct {
		taken bool
		want  int
	}{"kube-scheduler rejects the node": {false, 1}, "the room was taken": {true, 0}} {
		t.Run(name, bubble(func(t *testing.T) {
			pod := fake.Pod("p", 8, fake.Priority(5))
			f := start(t, sampledOptions, append(sampledCluster(pod), fake.Node("n4", 16))...)
			f.sampledCycle(pod)
			f.pass("the nomination", func() bool { return len(f.server.Calls().Nominated) > 0 })
			_, node, _ := strings.Cut(f.server.Calls().Nominated[0], "=")
			pod.Status.NominatedNodeName = node
			(*eventHandlers)(f.Scheduler).PodUpdated(nil, clustercache.NewPodInfo(pod))
			if test.taken {
				f.take(node)
				if result, err := f.Filter(pod, []string{node}); err != nil || len(result.Passed) > 0 {
					t.Fatalf("filter passes %v, %v", result.Names(), err)
				}
			}
			if victims := f.sampledCycle(pod); len(victims) != test.want {
				t.Errorf("victims %v, want %d", victims, test.want)
			}
		}))
	}
}

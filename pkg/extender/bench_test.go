package extender

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/cluster"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
)

const cardMemory = 16276

// crowded returns the router over a ledger of nodes with eight cards each, of which about 90% is allocated, and the names of
// the nodes.
func crowded(t testing.TB, nodes, best int) (*fixture, []string) {
	f := start(t)
	return f, f.crowd(nodes, best)
}

// crowd adds such nodes to the ledger, and returns their names.
func (f *fixture) crowd(nodes, best int) []string {
	f.best(best)
	l, names := f.cluster.Ledger(), make([]string, nodes)
	for i := range names {
		names[i] = fmt.Sprintf("gpu-node-%05d.example", i)
		spec := ledger.NodeSpec{Unit: gpu.MiB}
		for card := range 8 {
			spec.Cards = append(spec.Cards, gpu.Card{Index: card, Memory: cardMemory, NUMANode: gpu.NoNUMANode})
		}
		l.SetNode(names[i], spec)
		for card := range 8 {
			for part := range 7 {
				pod := gpu.Pod{UID: gpu.PodUID(fmt.Sprintf("%s-%d-%d", names[i], card, part)), Request: gpu.Memory(1950 + (31*i+20*card)%220)}
				l.SetBound(names[i], pod, gpu.On(card, pod.Request), time.Unix(1, 0))
			}
		}
	}
	return names
}

// usualPod returns a pod with the fields that the API server sets and that kube-scheduler's cache keeps.
func usualPod(name string, request int64) *corev1.Pod {
	pod := newPod(name, request)
	pod.CreationTimestamp = metav1.Unix(1780000000, 0)
	pod.ResourceVersion, pod.Labels = "1234567", map[string]string{"app": "trainer", "pod-template-hash": "6d4cf56db6"}
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "trainer-6d4cf56db6", UID: "c2f9a1de"}}
	pod.Spec.ServiceAccountName, pod.Spec.SchedulerName, pod.Spec.RestartPolicy = "default", "default-scheduler", corev1.RestartPolicyAlways
	pod.Spec.Volumes = []corev1.Volume{{Name: "kube-api-access"}}
	pod.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "kube-api-access", MountPath: "/var/run/secrets/kubernetes.io/serviceaccount"}}
	pod.Spec.Containers[0].Resources.Requests = pod.Spec.Containers[0].Resources.Limits
	pod.Spec.Tolerations = []corev1.Toleration{{Key: "node.kubernetes.io/not-ready", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}}
	pod.Status = corev1.PodStatus{Phase: corev1.PodPending, QOSClass: corev1.PodQOSBestEffort}
	return pod
}

// discard is a response writer that only counts bytes.
type discard struct {
	header http.Header
	bytes  int
}

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(p []byte) (int, error) { d.bytes += len(p); return len(p), nil }
func (d *discard) WriteHeader(int)             {}

// ask returns a function that sends the same request through the router on each call.
func (f *fixture) ask(verb string, args any) func() {
	body, err := json.Marshal(args)
	if err != nil {
		f.t.Fatal(err)
	}
	return func() {
		request := newRequest(http.MethodPost, Prefix+"/"+verb, string(body))
		f.handler.ServeHTTP(&discard{header: http.Header{}}, request)
	}
}

// cases are the requests of the pods with which filter and prioritize are measured: one fits on some nodes, one on none.
var cases = map[string]int64{"fits": 2000, "full": 9000}

func TestThousandsOfNodesCostLessThanAnAllocationEach(t *testing.T) {
	const nodes = 2000
	for _, best := range []int{32, 0} {
		f, names := crowded(t, nodes, best)
		for name, request := range cases {
			filter := f.ask("filter", extenderv1.ExtenderArgs{Pod: usualPod("p", request), NodeNames: &names})
			if got := testing.AllocsPerRun(5, filter); got > nodes/2 {
				t.Errorf("filter, best %d, %s: %v allocations for %d nodes", best, name, got, nodes)
			} else {
				t.Logf("filter, best %d, %s: %v allocations for %d nodes", best, name, got, nodes)
			}
		}
	}
}

func BenchmarkVerbs(b *testing.B) {
	for _, nodes := range []int{100, 1000, 5000} {
		f, names := crowded(b, nodes, 32)
		for name, request := range cases {
			args := extenderv1.ExtenderArgs{Pod: usualPod("p", request), NodeNames: &names}
			b.Run(fmt.Sprintf("filter/%s/nodes=%d", name, nodes), func(b *testing.B) { repeat(b, f.ask("filter", args)) })
		}
		args := extenderv1.ExtenderArgs{Pod: usualPod("p", 2000), NodeNames: &names}
		b.Run(fmt.Sprintf("prioritize/nodes=%d", nodes), func(b *testing.B) { repeat(b, f.ask("prioritize", args)) })

		victims := map[string]*extenderv1.MetaVictims{}
		for _, name := range names[:min(100, nodes)] { // kube-scheduler proposes 100 nodes, or 10% if that is more.
			victims[name] = &extenderv1.MetaVictims{Pods: []*extenderv1.MetaPod{{UID: name + "-0-0"}, {UID: name + "-1-0"}}}
		}
		preempt := extenderv1.ExtenderPreemptionArgs{Pod: usualPod("p", 9000), NodeNameToMetaVictims: victims}
		b.Run(fmt.Sprintf("preempt/nodes=%d", nodes), func(b *testing.B) { repeat(b, f.ask("preempt", preempt)) })
	}
}

// repeat runs the benchmark, and also reports the 99th percentile.
func repeat(b *testing.B, once func()) {
	b.ReportAllocs()
	var took []time.Duration
	for b.Loop() {
		start := time.Now()
		once()
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "µs-p99")
}

// BenchmarkBind binds through a fake API server. The figures include its cost.
func BenchmarkBind(b *testing.B) {
	for _, nodes := range []int{100, 1000, 5000} {
		b.Run(fmt.Sprintf("nodes=%d", nodes), func(b *testing.B) {
			f, names := crowded(b, nodes, 32)
			f.repeatBind(b, names)
		})
	}
}

func (f *fixture) repeatBind(b *testing.B, names []string) {
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		f.serial++
		pod := usualPod(fmt.Sprintf("p%d", f.serial), 1)
		pod.UID = types.UID(pod.Name)
		b.StopTimer()
		if _, err := f.client.CoreV1().Pods(pod.Namespace).Create(b.Context(), pod, metav1.CreateOptions{}); err != nil {
			b.Fatal(err)
		}
		bind := f.ask("bind", bindArgs(pod, names[i%len(names)]))
		b.StartTimer()
		bind()
	}
}

// noObserver is a gang.Observer that does nothing.
type noObserver struct{}

func (noObserver) GangHeld(time.Duration) {}
func (noObserver) GangBound()             {}
func (noObserver) GangFailed(string)      {}
func (noObserver) GangStarving()          {}
func (noObserver) GangEvicted()           {}

// BenchmarkWithoutGroup measures filter and bind of pods without a gang in three cases: gangs are disabled; gangs are
// enabled and there are none; fifty gangs of twenty members wait for room and are retried repeatedly.
func BenchmarkWithoutGroup(b *testing.B) {
	const nodes, groups, size = 1000, 50, 20
	on := cluster.GangOptions{Hold: 10 * time.Second, Patience: 30 * time.Second, OnFailure: gang.Evict, Observer: noObserver{}}
	for _, setting := range []struct {
		name    string
		gangs   cluster.GangOptions
		waiting int
	}{{"groups=off", cluster.GangOptions{}, 0}, {"groups=0", on, 0}, {"groups=50", on, groups}} {
		var members []runtime.Object
		for i := range setting.waiting * size {
			member := usualPod(fmt.Sprintf("member-%d-%d", i/size, i%size), cardMemory)
			member.UID = types.UID(member.Name)
			member.Annotations = map[string]string{
				protocol.AnnotationGroupName: fmt.Sprint("group-", i/size), protocol.AnnotationGroupSize: fmt.Sprint(size),
			}
			members = append(members, member)
		}
		f := startWith(b, setting.gangs, members...)
		names := f.crowd(nodes, 32)
		await(b, "the groups to wait", func() bool { return f.cluster.GangStates()[gang.StatePending] == setting.waiting })
		for i := 0; i < len(members); i += size {
			f.ask("filter", extenderv1.ExtenderArgs{Pod: members[i].(*corev1.Pod), NodeNames: &names})()
		}
		args := extenderv1.ExtenderArgs{Pod: usualPod("p", 2000), NodeNames: &names}
		b.Run("filter/"+setting.name, func(b *testing.B) { repeat(b, f.ask("filter", args)) })
		b.Run("bind/"+setting.name, func(b *testing.B) { f.repeatBind(b, names) })
	}
}

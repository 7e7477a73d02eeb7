package extender

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/scheduling"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/fake"
)

const cardMemory = 16276

// bed is the router over a cluster.
type bed struct {
	*cluster
	handler http.Handler
	names   []string
	// serial is the number of pods that repeatBind has made.
	serial int
}

// forgetful is a Scheduler whose Filter names only the best nodes, however often it is called for a pod: the call to Bind
// fails, but shows that the answer before was of use.
type forgetful struct{ *scheduling.Scheduler }

func (f forgetful) Filter(pod *corev1.Pod, nodes []string) (scheduling.FilterResult, error) {
	_ = f.Bind(context.Background(), scheduling.BindRequest{UID: pod.UID})
	return f.Scheduler.Filter(pod, nodes)
}

// crowded returns a bed with nodes of eight cards each, of which about 90% is allocated, to podsPerCard pods each.
func crowded(t testing.TB, nodes, podsPerCard int, options ...func(*scheduling.Options)) *bed {
	t.Helper()
	c := startCluster(t, options...)
	server := newServer(forgetful{c.Scheduler}, func(o *Options) { o.Observer = c.metrics })
	f := &bed{cluster: c, handler: server.Handler(), names: make([]string, nodes)}
	const cards = 8
	for i := range f.names {
		name := fmt.Sprintf("gpu-node-%05d.example", i)
		f.names[i] = name
		c.addNode(name, slices.Repeat([]int64{cardMemory}, cards)...)
		for card := range cards {
			for part := range podsPerCard {
				request := int64(7*(1950+(31*i+20*card)%220)) / int64(podsPerCard)
				pod := fake.Pod(fmt.Sprintf("%s-%d-%d", name, card, part), request, fake.Bound(name, card))
				pod.UID = types.UID(pod.Name)
				c.addPod(pod)
			}
		}
	}
	last := f.names[nodes-1]
	c.awaitNode(t, last, cards*podsPerCard)
	return f
}

// filterBest makes filter pass only the best k nodes, however few candidate nodes there are.
func filterBest(k int) func(*scheduling.Options) {
	return func(o *scheduling.Options) { o.FilterBest = k }
}

// usualPod returns a pod with the fields that the API server sets and that kube-scheduler's cache keeps.
func usualPod(name string, request int64) *corev1.Pod {
	pod := fake.Pod(name, request)
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

// discard is a response writer that drops what is written.
type discard struct{ header http.Header }

func (d discard) Header() http.Header         { return d.header }
func (d discard) Write(p []byte) (int, error) { return len(p), nil }
func (d discard) WriteHeader(int)             {}

// request returns a function that sends the same request through the router on each call.
func (f *bed) request(t testing.TB, verb string, args any) func() {
	body := text(t, args)
	return func() {
		f.handler.ServeHTTP(discard{http.Header{}}, newRequest(http.MethodPost, Prefix+"/"+verb, body))
	}
}

// cases are the requests of the pods with which filter and prioritize are measured: one fits on some nodes, one on none.
var cases = map[string]int64{"fits": 2000, "full": 9000}

func TestFilterAllocations(t *testing.T) {
	const nodes = 2000
	for _, best := range []int{32, 0} {
		f := crowded(t, nodes, 1, filterBest(best))
		for name, request := range cases {
			filter := f.request(t, "filter", nodesRequest(usualPod("p", request), f.names...))
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
		f := crowded(b, nodes, 7, filterBest(32))
		for name, request := range cases {
			pod := usualPod(name, request)
			f.addPod(pod) // kube-scheduler's watch is rarely ahead.
			args := nodesRequest(pod, f.names...)
			b.Run(fmt.Sprintf("filter/%s/nodes=%d", name, nodes), func(b *testing.B) { repeat(b, f.request(b, "filter", args)) })
		}
		two := usualPod("two", 4000)
		two.Labels[protocol.LabelCount] = "2"
		f.addPod(two)
		several := nodesRequest(two, f.names...)
		b.Run(fmt.Sprintf("filter/two-cards/nodes=%d", nodes), func(b *testing.B) { repeat(b, f.request(b, "filter", several)) })
		args := nodesRequest(usualPod("p", 2000), f.names...)
		b.Run(fmt.Sprintf("prioritize/nodes=%d", nodes), func(b *testing.B) { repeat(b, f.request(b, "prioritize", args)) })

		victims := map[string]*extenderv1.MetaVictims{}
		for _, name := range f.names[:min(100, nodes)] { // kube-scheduler proposes 100 nodes, or 10% if that is more.
			victims[name] = &extenderv1.MetaVictims{Pods: []*extenderv1.MetaPod{{UID: name + "-0-0"}, {UID: name + "-1-0"}}}
		}
		preempt := extenderv1.ExtenderPreemptionArgs{Pod: usualPod("p", 9000), NodeNameToMetaVictims: victims}
		b.Run(fmt.Sprintf("preempt/nodes=%d", nodes), func(b *testing.B) { repeat(b, f.request(b, "preempt", preempt)) })
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

func (f *bed) repeatBind(b *testing.B) {
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		f.serial++
		pod := usualPod(fmt.Sprintf("p%d", f.serial), 1)
		b.StopTimer()
		f.addPod(pod)
		bind := f.request(b, "bind", bindArgs(pod, f.names[i%len(f.names)]))
		b.StartTimer()
		bind()
	}
}

// BenchmarkWithoutGroup measures filter and bind of pods without a gang: gangs are disabled; gangs are enabled and there are none;
// many gangs wait for room and are retried repeatedly.
func BenchmarkWithoutGroup(b *testing.B) {
	const nodes = 1000
	gangs := func(o *scheduling.Options) {
		o.Gangs = scheduling.GangOptions{Hold: 10 * time.Second, Patience: 30 * time.Second, OnFailure: gang.Evict, Observer: &fake.Observer{}}
	}
	for _, setting := range []struct {
		name    string
		options func(*scheduling.Options)
		pending int
		size    int
	}{{"groups=off", func(*scheduling.Options) {}, 0, 1}, {"groups=0", gangs, 0, 1}, {"groups=50", gangs, 50, 20}, {"groups=1000", gangs, 1000, 8}} {
		f := crowded(b, nodes, 7, filterBest(32), setting.options)
		var members []*corev1.Pod
		for i := range setting.pending * setting.size {
			member := usualPod(fmt.Sprintf("member-%d-%d", i/setting.size, i%setting.size), cardMemory)
			member.Annotations = map[string]string{
				protocol.AnnotationGroupName: fmt.Sprint("group-", i/setting.size), protocol.AnnotationGroupSize: fmt.Sprint(setting.size),
			}
			members = append(members, member)
			f.addPod(member)
		}
		await.True(b, "the members are pending", func() bool { return len(f.Explain().Pending) == len(members) })
		for i := 0; i < len(members); i += setting.size {
			f.request(b, "filter", nodesRequest(members[i], f.names...))()
		}
		args := nodesRequest(usualPod("p", 2000), f.names...)
		b.Run("filter/"+setting.name, func(b *testing.B) { repeat(b, f.request(b, "filter", args)) })
		b.Run("bind/"+setting.name, func(b *testing.B) { f.repeatBind(b) })
	}
}

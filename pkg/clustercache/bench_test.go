package clustercache

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientfake "k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// BenchmarkLock measures the methods that read many objects, with 10,000 nodes and 100,000 pods, all of which are pending or all of which use more
// than they request. While they read, event handlers wait. longest-update-ns is the longest time that an update of a pod took.
func BenchmarkLock(b *testing.B) {
	const nodes, pods = 10_000, 100_000
	c := New(Options{Client: clientfake.NewClientset(), Clock: clock.RealClock{}})
	for i := range nodes {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i)}}
		check.Must(b, c.nodeInformer.GetIndexer().Add(node))
	}
	for i := range pods {
		pod := gpu.Pod{UID: gpu.PodUID(fmt.Sprint("uid-", i)), Namespace: "default", Name: fmt.Sprint("pod-", i), Request: 10}
		bound := &PodInfo{PodUse: eligibility.PodUse{Pod: pod, Node: nodeName(i % nodes)}, Overuse: &protocol.Overuse{}, RequestProblem: "none"}
		check.Must(b, c.podInformer.GetIndexer().Add(bound))
		c.pending.update(&PodInfo{PodUse: eligibility.PodUse{Pod: pod}, Pending: &diagnosis.Pod{Pod: pod}}, c.Clock.Now())
	}
	changing := gpu.Pod{UID: "changing", Namespace: "default", Name: "changing", Request: 10}
	update := func() {
		bound := &PodInfo{PodUse: eligibility.PodUse{Pod: changing, Node: nodeName(0)}, Overuse: &protocol.Overuse{}, RequestProblem: "none"}
		check.NoError(b, c.podInformer.GetIndexer().Update(bound))
		c.pending.update(&PodInfo{PodUse: bound.PodUse, Pending: &diagnosis.Pod{Pod: changing}}, c.Clock.Now())
	}
	for name, call := range map[string]func(){
		"Pending":         func() { c.Pending() },
		"RequestProblems": func() { c.RequestProblems() },
		"Reported":        func() { c.Reported() },
		"MayOveruse":      func() { c.MayOveruse() },
		"Nodes":           func() { c.Nodes() },
	} {
		b.Run(name, func(b *testing.B) {
			longest := fake.LongestBeside(update, func() {
				for b.Loop() {
					call()
				}
			})
			b.ReportMetric(float64(longest.Nanoseconds()), "longest-update-ns")
		})
	}
}

// BenchmarkTransform measures what each report about a pod costs before the event handlers get it.
func BenchmarkTransform(b *testing.B) {
	pending := fake.Pod("trainer-6d4cf56db6-x2x8k", 2000, fake.CPU(4))
	pending.Labels = map[string]string{"app": "trainer", "pod-template-hash": "6d4cf56db6"}
	pending.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "trainer-6d4cf56db6", UID: "c2f9a1de", Controller: new(true)}}
	pending.Spec.Volumes = []corev1.Volume{{Name: "kube-api-access", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{}}}}
	pending.Spec.Tolerations = []corev1.Toleration{
		{Key: "node.kubernetes.io/not-ready", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
		{Key: "node.kubernetes.io/unreachable", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute},
	}
	for name, pod := range map[string]*corev1.Pod{"pending": pending, "bound": fake.Edited(pending, fake.Bound("n1", 0))} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var s sharing
			for b.Loop() {
				_, err := s.transform(pod)
				check.NoError(b, err)
			}
		})
	}
}

func nodeName(i int) string { return fmt.Sprintf("gpu-node-%05d.example", i) }

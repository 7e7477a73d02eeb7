package clustercache

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// A pod is reported while it is bound, and its annotations report over-use or a limit that is not in force, or it was bound without the
// extender.
func TestReported(t *testing.T) {
	over := fake.Annotation(protocol.AnnotationOveruse, `{"usedMiB":3,"requestedMiB":2,"cards":{"0":{"usedMiB":3,"requestedMiB":2}}}`)
	unlimited := fake.Annotation(protocol.AnnotationIsolation, "driver: container c: its cgroup has no limit")
	f := start(t, fake.Pod("b", 1, fake.Bound("n1", 0), over), fake.Pod("a", 1, fake.Bound("n2", 0), unlimited), fake.Pod("pending", 1, over),
		fake.Pod("c", 1, fake.BoundWithoutExtender("n1")),
		fake.Pod("limited", 1, fake.Bound("n1", 0), fake.Annotation(protocol.AnnotationIsolation, "driver")),
		fake.Pod("ended", 1, fake.Bound("n1", 0), fake.Phase(corev1.PodSucceeded), over),
		fake.Pod("may", 1, fake.Bound("n1", 0), fake.Annotation(protocol.AnnotationLimit("main"), "8Gi")))
	for range 7 {
		<-f.got.pods
	}
	names := func(pods []*PodInfo) (names []string) {
		for _, pod := range pods {
			names = append(names, pod.Name)
		}
		return names
	}
	wantEqual(t, "reported pods", []string{"a", "b", "c"}, names(f.Reported()))
	wantEqual(t, "pods that use more than they request, or may", []string{"b", "may"}, slices.Sorted(slices.Values(names(f.MayOveruse()))))
	f.publish(fake.Pod("b", 1, fake.Bound("n1", 0)))
	f.want(f.got.pods, "uid-b becomes uid-b")
	wantEqual(t, "pods that are still reported", []string{"a", "c"}, names(f.Reported()))
}

// A pending pod that asks for whole cards has a request problem while no node offers them.
func TestUnservedRequests(t *testing.T) {
	node := fake.Node("n1", 100)
	f := start(t, node, fake.Pod("a", 0, func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Limits = fake.Amount(protocol.ResourceWholeCard, 1)
	}))
	<-f.got.pods
	f.want(f.got.nodes, "updated n1")
	if got := f.RequestProblems(); len(got) != 1 {
		t.Errorf("%d problems, want one", len(got))
	}
	node = node.DeepCopy()
	node.Status.Capacity = fake.Amount(protocol.ResourceWholeCard, 1)
	f.publishNode(node)
	f.want(f.got.nodes, "updated n1")
	if got := f.RequestProblems(); len(got) != 0 {
		t.Errorf("%d problems while a node offers whole cards", len(got))
	}
}

// A pod with a request problem is listed while it exists, has not ended and isn't being deleted.
func TestRequestProblems(t *testing.T) {
	misspelled := func(pod *corev1.Pod) {
		pod.Spec.Containers[0].Resources.Limits = fake.Amount("aliyun.com/gpumem", 1)
	}
	f := start(t, fake.Pod("b", 0, fake.On("n1")), fake.Pod("a", 0, misspelled), fake.Pod("fine", 10),
		fake.Pod("ended", 0, fake.Phase(corev1.PodSucceeded)), fake.Pod("terminating", 0, fake.Terminating(begin)))
	for range 5 {
		<-f.got.pods
	}
	want := func(want ...string) {
		t.Helper()
		var got []string
		for _, pod := range f.RequestProblems() {
			got = append(got, pod.Name)
		}
		wantEqual(t, "pods with a problem", want, got)
	}
	want("a", "b")
	f.publish(fake.Pod("a", 0, misspelled, fake.Phase(corev1.PodFailed)))
	f.want(f.got.pods, "uid-a becomes uid-a")
	want("b")
	f.publish(fake.Pod("b", 0, func(pod *corev1.Pod) { pod.UID = "another" }))
	f.want(f.got.pods, "uid-b becomes another")
	want("b")
	check.Must(t, f.client.CoreV1().Pods("default").Delete(t.Context(), "b", metav1.DeleteOptions{}))
	f.want(f.got.pods, "deleted another")
	want()
}

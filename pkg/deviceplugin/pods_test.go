package deviceplugin

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The list of pods can lack a pod before the record learns of the pod's end.
func TestPodsThatAreGone(t *testing.T) {
	pods, err := newPodSource(fakeClient(fake.NewClientset()), testNode)
	if err != nil {
		t.Fatal(err)
	}
	a := &allocator{pods: pods, cards: newCardState(gpu.GiB), record: newRecord(), met: map[gpu.PodUID]bool{}, refused: map[gpu.PodUID]bool{}, now: time.Now}
	for _, uid := range []gpu.PodUID{"uid-stays", "uid-goes", "uid-not-heard-of"} {
		a.record.Serve(uid, "main", serving{Card: 0, Request: 1})
	}
	stays, goes := newPod("stays", main(1)), newPod("goes", main(1))
	tell := func(pods ...*corev1.Pod) {
		t.Helper()
		var objects []any
		for _, pod := range pods {
			objects = append(objects, pod)
		}
		if err := a.pods.informer.GetStore().Replace(objects, ""); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(s *snapshot, want gpu.Memory) {
		t.Helper()
		if got := s.used("", false)[0]; got != want {
			t.Errorf("%d is taken, want %d", got, want)
		}
	}
	tell(stays, goes)
	expect(a.known(), 3)
	expect(a.snapshot(views(stays, goes, newPod("not-heard-of", main(1)))), 3)
	expect(a.known(), 3) // The informer lags behind the API server.
	expect(a.snapshot(views(stays)), 2)
	tell(stays)
	for range 2 {
		expect(a.known(), 2)
	}
}

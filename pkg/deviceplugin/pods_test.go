package deviceplugin

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/gpushare/gpushare/pkg/gpu"
)

func TestObjectsThatClaimToBeOnePod(t *testing.T) {
	real := newPod("real", main(16), mirrors("static"), created(1))
	forged := newPod("forged", main(1), mirrors("static"), created(2))
	ordinary := newPod("ordinary", main(8), created(5))
	copied := newPod("copied", main(1), mirrors("uid-ordinary"), created(0))
	pods := []*corev1.Pod{real, forged, ordinary, copied}
	for range 4 {
		pods = append(pods[1:], pods[0])
		var got []string
		for _, view := range distinct(views(pods...)) {
			got = append(got, view.Name)
		}
		if want := []string{"real", "ordinary"}; !slices.Equal(got, want) {
			t.Errorf("of %v are left %v, want %v", pods, got, want)
		}
	}

	b := newBench(t)
	p, _ := b.start(newCards(16))
	b.create(p, forged, real, copied, ordinary)
	await(t, "the informer to know all of them", func() bool { return len(p.pods.informer.GetStore().List()) == len(pods) })
	for uid, want := range map[gpu.PodUID]string{"static": "real", "uid-ordinary": "ordinary"} {
		if got, ok := p.pods.ByUID(uid); !ok || got.Name != want {
			t.Errorf("%s is %q, want %q", uid, got.Name, want)
		}
	}
	if got := p.pods.Cached(); len(got) != 2 {
		t.Errorf("known are %v", got)
	}
}

// The record hears of a pod's end later than the pods are known to be fewer.
func TestPodsThatAreGone(t *testing.T) {
	pods, err := newPodSource(fakeClient(fake.NewClientset()), testNode)
	if err != nil {
		t.Fatal(err)
	}
	a := &allocator{pods: pods, cards: newCardState(gpu.GiB), record: newRecord(), met: map[gpu.PodUID]bool{}, refused: map[gpu.PodUID]bool{}, now: time.Now}
	for _, uid := range []gpu.PodUID{"uid-stays", "uid-goes", "static", "static-too", "uid-not-heard-of"} {
		a.record.Serve(uid, "main", serving{Card: 0, Request: 1})
	}
	stays, goes, mirror := newPod("stays", main(1)), newPod("goes", main(1)), newPod("mirror", main(1), mirrors("static"))
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
	tell(stays, goes, mirror)
	expect(a.known(), 5)
	expect(a.snapshot(views(stays, goes, mirror, newPod("not-heard-of", main(1)))), 5)
	expect(a.known(), 5) // The informer lags behind the API server.
	expect(a.snapshot(views(stays, mirror)), 4)
	tell(stays)
	for range 2 {
		expect(a.known(), 4)
	}
}

package deviceplugin

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The plugin's watch of pods is broken, as for up to half a minute after a restart of the API server. A pod comes, ends and is deleted. The
// next one gets its card: the list that the plugin reads for it doesn't have the first one any more.
func TestPodCameAndWentWhileWatchBroken(t *testing.T) {
	b := newFixture(t)
	b.blind = true
	b.servePodResources()
	k, p := b.up(16)
	first, next := newPod("first", main(16), assumed(0, 0)), newPod("next", main(16), assumed(0, 1))
	b.create(p, first)
	k.mustAdmit(first)
	b.delete(p, first)
	k.removePod(first)
	b.create(p, next)
	if _, err := k.admit(next); err != nil {
		t.Errorf("the API server has no other pod on the node: %v", err)
	}
}

// The plugin's watch is behind. It knows the pods old (8 of 16, runs) and waiting (8, bound). old ends, and new takes its place. The kubelet
// admits new first, as in a batch, which it sorts by age. Then waiting fits, beside new.
func TestRefusedByOldState(t *testing.T) {
	b := newFixture(t)
	b.servePodResources()
	old := newPod("old", main(8), assumed(0, 0))
	waiting, fresh := newPod("waiting", main(8), assumed(0, 1), created(9)), newPod("new", main(8), assumed(0, 2), created(1))
	b.blind = true
	for _, pod := range []*corev1.Pod{old, waiting} { // Before the plugin's first list.
		if _, err := b.client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	k, p := b.up(16)
	k.mustAdmit(old)
	ended := b.pod("old")
	ended.Status.Phase = corev1.PodSucceeded
	if _, err := b.client.CoreV1().Pods("default").UpdateStatus(t.Context(), ended, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	k.removePod(old)
	b.create(p, fresh)
	k.mustAdmit(fresh)
	if _, err := k.admit(waiting); err != nil {
		t.Errorf("on the API server the card has 8 of 16 in use: %v", err)
	}
}

// The plugin's watch is behind. It knows a pod with a node name, which no scheduler has placed, but not the pod that the scheduler has placed on
// the node's only card since.
func TestPlacedByOldState(t *testing.T) {
	b := newFixture(t)
	b.servePodResources()
	b.blind = true
	direct := newPod("direct", main(8))
	if _, err := b.client.CoreV1().Pods("default").Create(t.Context(), direct, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	k, p := b.up(16)
	scheduled := newPod("scheduled", main(16), assumed(0, 1))
	b.create(p, scheduled)
	if _, err := k.admit(direct); err == nil {
		t.Error("a pod with a node name got memory that the scheduler has given to another one")
	}
	if _, err := k.admit(scheduled); err != nil {
		t.Error(err)
	}
}

// The plugin has just started, and no GPU pod runs on the node. It knows a pod that the kubelet doesn't know yet. The kubelet admits another
// one of this size, which the plugin's watch has not delivered. The kubelet can be asked, but its answers don't count, because it has known no
// pod with GPU memory yet. Other pods run on the node (the plugin's own): a question about one of them would show that the answers count.
func TestFirstPodOfANode(t *testing.T) {
	b := newFixture(t)
	b.servePodResources()
	b.blind = true
	own := newPod("device-plugin", main(0), ran(true))
	later := newPod("later", main(8), assumed(0, 1))
	for _, pod := range []*corev1.Pod{own, later} {
		if _, err := b.client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	k, p := b.up(16, 16)
	k.mustAdmit(own)
	first := newPod("first", main(8), assumed(1, 2))
	b.create(p, first)
	if got := cardOf(k.mustAdmit(first)["main"]); got != "1" {
		t.Errorf("the scheduler chose card 1, the container got card %s", got)
	}
}

package deviceplugin

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// idsOf returns the IDs of all devices of the cards.
func idsOf(cards ...gpu.Card) []string {
	var ids []string
	for _, d := range devices(cards) {
		ids = append(ids, d.ID)
	}
	return ids
}

// booked fails the test if the kubelet has booked the pod's devices on another card than this one, or if an allocation
// used devices of another card.
func (k *kubelet) booked(p *Plugin, pod *corev1.Pod, card int) {
	k.t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, e := range k.entries {
		if ids := e.DeviceIDs[-1]; e.PodUID == string(pod.UID) && slices.ContainsFunc(ids, func(id string) bool { return !ofCard(card)(id) }) {
			k.t.Errorf("container %s has devices %v in the kubelet's books, want those of card %d", e.ContainerName, ids, card)
		}
	}
	if got := testutil.ToFloat64(p.metrics.otherDevices); got != 0 {
		k.t.Errorf("counted %v allocations with devices of another card", got)
	}
}

// A card that has no room at GetPreferredAllocation can have room at Allocate.
func TestDevicesOfAFullCardArePreferred(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 16)
	cards := newCards(16, 16)
	one, two := newPod("one", main(10)), newPod("two", main(10))
	b.create(p, one, two)
	k.mustAdmit(one)
	k.mustAdmit(two)
	promised := newPod("promised", main(8), assumed(1, 1))
	b.create(p, promised)
	ids := p.allocator.Prefer(t.Context(), idsOf(cards...), nil, 8)
	if len(ids) != 8 || slices.ContainsFunc(ids, func(id string) bool { return !ofCard(1)(id) }) {
		t.Errorf("preferred are %v, want devices of card 1", ids)
	}
	b.delete(p, two)
	response, err := p.allocator.Allocate(t.Context(), ids)
	if err != nil || cardOf(response.Envs) != "1" {
		t.Errorf("got %v, %v", response, err)
	}
	if got := testutil.ToFloat64(p.metrics.otherDevices); got != 0 {
		t.Errorf("counted %v allocations with devices of another card", got)
	}
	// A pod that has no chosen card and fits no card gets no preference.
	b.create(p, newPod("unassigned", main(15)))
	if ids := p.allocator.Prefer(t.Context(), idsOf(cards...), nil, 15); ids != nil {
		t.Errorf("preferred are %v for a pod that fits nowhere", ids)
	}
}

// The plugin may have to name preferred devices before the kubelet has shown which pod they are for. Once the kubelet
// shows it, its answer decides.
func TestGuessedPreferenceIsChecked(t *testing.T) {
	b := newBench(t)
	b.askable()
	k, p := b.up(16, 16)
	b.trust(k, p)
	early, late := newPod("early", main(4), assumed(0, 1)), newPod("late", main(4), assumed(1, 2))
	b.create(p, early, late)

	limit := func(l *rate.Limiter) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.admitted["default/late"], k.asked = late, l
	}
	limit(rate.NewLimiter(0, 0)) // Other clients use up the limit, so the plugin gets no answer.
	ids := p.allocator.Prefer(t.Context(), idsOf(newCards(16, 16)...), nil, 4)
	if slices.ContainsFunc(ids, func(id string) bool { return !ofCard(0)(id) }) {
		t.Fatalf("preferred are %v: the test expects the order to mislead", ids)
	}
	limit(rate.NewLimiter(100, 10))
	response, err := p.allocator.Allocate(t.Context(), ids)
	if err != nil || cardOf(response.Envs) != "1" {
		t.Errorf("got %v, %v, want the card of the pod that the kubelet asks for", response, err)
	}
}

// The annotations of a pod can change between GetPreferredAllocation and Allocate: a wrong match was written to them, and
// the pod that it concerned is known only now.
func TestAnnotationsChangedSincePreferred(t *testing.T) {
	b := newBench(t)
	k, p := b.up(16, 16, 16)
	cards := newCards(16, 16, 16)
	full := newPod("full", main(16))
	b.create(p, full)
	k.mustAdmit(full)
	moved := newPod("moved", main(8), assumed(0, 1))
	b.create(p, moved)
	ids := p.allocator.Prefer(t.Context(), idsOf(cards...), nil, 8)
	if len(ids) != 8 || slices.ContainsFunc(ids, func(id string) bool { return !ofCard(1)(id) }) {
		t.Fatalf("preferred are %v, want devices of card 1", ids)
	}
	assumed(2, 1)(moved)
	if _, err := b.client.CoreV1().Pods(moved.Namespace).Update(t.Context(), moved, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	await(t, "the plugin to know of the change", func() bool {
		pod, ok := p.pods.ByUID(gpu.PodUID(moved.UID))
		return ok && pod.Assignment.Card == 2
	})
	response, err := p.allocator.Allocate(t.Context(), ids)
	if err != nil || cardOf(response.Envs) != "1" {
		t.Errorf("got %v, %v, want the card whose devices the kubelet was told to take", response, err)
	}
	if got := testutil.ToFloat64(p.metrics.otherDevices); got != 0 {
		t.Errorf("counted %v allocations with devices of another card", got)
	}
	b.awaitEvent("container main got card 1: the kubelet was told to take its devices when card 2 had no room for the pod, or wasn't the pod's")
	b.awaitAssigned("moved", 1)
}

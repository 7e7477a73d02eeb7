package deviceplugin

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"

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

// checkDevices fails the test if the kubelet gave the pod devices of another card than this one, or if an allocation
// used devices of another card.
func (k *kubelet) checkDevices(p *Plugin, pod *corev1.Pod, card int) {
	k.t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, e := range k.entries {
		if ids := e.DeviceIDs[-1]; e.PodUID == string(pod.UID) && !evenlyOf([]int{card}, ids) {
			k.t.Errorf("container %s has devices %v in the kubelet's checkpoint, want those of card %d", e.ContainerName, ids, card)
		}
	}
	if got := testutil.ToFloat64(p.metrics.otherDevices); got != 0 {
		k.t.Errorf("counted %v allocations with devices of another card", got)
	}
}

// TestPreferFullCard: a card that has no room at GetPreferredAllocation can have room at Allocate.
func TestPreferFullCard(t *testing.T) {
	b := newFixture(t)
	k, p := b.up(16, 16)
	cards := newCards(16, 16)
	one, two := newPod("one", main(10)), newPod("two", main(10))
	b.create(p, one, two)
	k.mustAdmit(one)
	k.mustAdmit(two)
	annotated := newPod("annotated", main(8), assumed(1, 1))
	b.create(p, annotated)
	ids := p.allocator.Prefer(t.Context(), idsOf(cards...), nil, 8)
	if len(ids) != 8 || !evenlyOf([]int{1}, ids) {
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

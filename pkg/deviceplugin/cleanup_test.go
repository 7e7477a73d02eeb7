package deviceplugin

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
)

func TestCleanup(t *testing.T) {
	b := newFixture(t)
	others := corev1.ResourceList{corev1.ResourceCPU: *newQuantity(4), protocol.ResourceMemory: *newQuantity(0)}
	node := b.node()
	node.Annotations = map[string]string{protocol.AnnotationInventory: "{}", "example.com/other": "kept"}
	node.Status.Capacity, node.Status.Allocatable = others.DeepCopy(), others.DeepCopy()
	for _, list := range []corev1.ResourceList{node.Status.Capacity, node.Status.Allocatable} {
		list[protocol.ResourceCount], list[protocol.ResourceCores] = *newQuantity(8), *newQuantity(800)
	}
	if _, err := b.client.CoreV1().Nodes().Update(context.Background(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // A second cleanup does no harm.
		check.Must(t, Cleanup(t.Context(), fakeClient(b.client), testNode))
	}
	after := b.node()
	for _, list := range []corev1.ResourceList{after.Status.Capacity, after.Status.Allocatable} {
		check.Equal(t, "the result", others, list)
	}
	check.Equal(t, "the result", map[string]string{"example.com/other": "kept"}, after.Annotations)
	if err := Cleanup(t.Context(), fakeClient(b.client), "nowhere"); err == nil {
		t.Error("no error for a missing node")
	}
}

// TestKnownCards checks that the node's inventory outlives the plugin.
func TestKnownCards(t *testing.T) {
	b := newFixture(t)
	_, stop := b.start(newCards(16, 16))
	startKubelet(t, b.dir)
	b.awaitHealthy(2)
	stop()
	p, stop := b.start(nil)
	cards, boot := p.KnownCards(t.Context())
	if diff := cmp.Diff(newCards(16, 16), cards); diff != "" || boot != "this boot" {
		t.Errorf("boot %q (-want +got)\n%s", boot, diff)
	}
	stop()
	unit := 4 * gpu.GiB
	b.config.Flags = func(s *nodeconfig.Settings) { s.Unit = unit }
	p, _ = b.start(nil)
	if cards, _ = p.KnownCards(t.Context()); cards[0].Memory != 4 {
		t.Errorf("16 GiB are %d units of 4 GiB, want 4", cards[0].Memory)
	}

	p, _ = newFixtureAlone(t).start(nil)
	if got, boot := p.KnownCards(t.Context()); len(got) > 0 || boot != "" {
		t.Errorf("a node without an inventory has %v of boot %q", got, boot)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p, err := New(Options{Client: fakeClient(b.client), Events: b.events, NodeName: testNode, Directory: b.dir})
	check.Must(t, err)
	if got, _ := p.KnownCards(ctx); len(got) > 0 {
		t.Errorf("a plugin that was never run has %v", got)
	}
}

// TestSimulatedCards: a plugin with real cards removes the mark of one with simulated cards, and doesn't take those for cards that are lost.
func TestSimulatedCards(t *testing.T) {
	b := newFixture(t)
	startKubelet(t, b.dir)
	for _, simulated := range []bool{true, false, true} {
		b.simulated = simulated
		p, stop := b.start(nil)
		if cards, boot := p.KnownCards(t.Context()); len(cards) > 0 || boot != "" {
			t.Errorf("simulated %t: the plugin knows %v of boot %q, the cards of another kind", simulated, cards, boot)
		}
		p.SetCards(gpu.GiB, newCards(16), nil, nil, "")
		await.True(t, "the node's inventory", func() bool {
			inventory, err := protocol.ParseInventory(b.node().Annotations)
			return err == nil && inventory.Simulated == simulated
		})
		await.True(t, "a plugin of the same kind knows the card", func() bool {
			cards, _ := p.KnownCards(t.Context())
			return len(cards) == 1
		})
		stop()
	}
}

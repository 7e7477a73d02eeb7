package inspect

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/check"
)

// TestPodsWithoutCard: pods whose annotations name no card count on the cards on which the node is likely to place them.
func TestPodsWithoutCard(t *testing.T) {
	garbled := func(p *corev1.Pod) { p.Annotations[protocol.AnnotationIndex] = "first" }
	for name, test := range map[string]struct {
		cards []gpu.Card
		pods  []podBuilder
		used  []gpu.Memory
	}{
		"on the fullest card with room": {
			[]gpu.Card{t4(0, 16), t4(1, 16), t4(2, 16)}, []podBuilder{newPod("a", 12).on("n", 0), newPod("b", 5).on("n", 1), newPod("c", 6).bound("n")},
			[]gpu.Memory{12, 11, 0},
		},
		"several, in the order of their names": {
			[]gpu.Card{t4(0, 16), t4(1, 16)}, []podBuilder{newPod("a", 10).bound("n"), newPod("b", 7).bound("n"), newPod("c", 9).on("n", 1)},
			[]gpu.Memory{10, 16},
		},
		"not on an unhealthy card": {
			[]gpu.Card{unhealthy(t4(0, 16), "Xid 79"), t4(1, 16)}, []podBuilder{newPod("a", 7).bound("n")}, []gpu.Memory{0, 7},
		},
		"nowhere if no card has room": {
			[]gpu.Card{t4(0, 16)}, []podBuilder{newPod("a", 9).on("n", 0), newPod("b", 8).bound("n")}, []gpu.Memory{9},
		},
		"with an annotation that can't be read": {
			[]gpu.Card{t4(0, 16)}, []podBuilder{newPod("a", 9).bound("n").with(garbled)}, []gpu.Memory{9},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got []gpu.Memory
			node := Build(objects([]nodeBuilder{inventoryNode(t, "n", "10.0.0.1", gpu.GiB, test.cards...)}, test.pods...)).Nodes[0]
			for _, card := range node.Cards {
				got = append(got, card.Allocated)
			}
			check.Equal(t, "allocated by card", test.used, got)
		})
	}
}

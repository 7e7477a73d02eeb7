package e2e

import (
	"strconv"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// What docs/operations.md says of a failed card: the node offers the memory of its healthy cards, and the requests of pods on
// the failed one are still subtracted from that.
func TestFailedCardAndNodeSum(t *testing.T) {
	bed := framework.StartForTest(t, framework.Options{MemoryUnit: "GiB"})
	node := addMachine(t, bed, framework.NodeSpec{Name: "node", Cards: []uint64{16384, 16384}})
	playOn(t, bed, node, "a pod waits for the pods of the failed card, although the other card is empty", func(s *scene) {
		holder := s.assigned(s.place("holder", 16, on(node.Name)).Name)
		object, err := bed.Client.CoreV1().Nodes().Get(s.Context(), node.Name, metav1.GetOptions{})
		must(s, err)
		inventory, err := protocol.ParseInventory(object.Annotations)
		must(s, err)
		for _, card := range inventory.Cards {
			if strconv.Itoa(card.Index) == holder.Annotations[protocol.AnnotationIndex] {
				must(s, node.Machine.Xid(card.UUID, 79))
			}
		}
		s.awaitAllocatable(node, 16)
		s.create("waiting", 16, on(node.Name))
		s.refused("waiting", "Insufficient "+string(protocol.ResourceMemory))
		s.remove("holder")
		s.assigned("waiting")
	})
}

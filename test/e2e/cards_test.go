package e2e

import (
	"context"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// inventory returns the inventory in the node's annotation.
func (s *scene) inventory(ctx context.Context, m machine) (protocol.Inventory, error) {
	object, err := s.Cluster.Client.CoreV1().Nodes().Get(ctx, m.Name, metav1.GetOptions{})
	if err != nil {
		return protocol.Inventory{}, err
	}
	return protocol.ParseInventory(object.Annotations)
}

// TestFailedCard shows what docs/operations.md says of a failed card: the node has the memory of its healthy cards, and
// kube-scheduler still subtracts the requests of the pods on the failed card from it.
func TestFailedCard(t *testing.T) {
	c := shared.Start(t)
	m := addMachine(t, c, framework.NodeSpec{Name: "node", MemoryUnit: "GiB", Cards: []uint64{16384, 16384}})
	playOn(t, c, m, "a pod is pending although the healthy card is free", func(s *scene) {
		s.Place(s.Pod("first", 16).OnNode(m.Name))
		first := s.WaitAssigned("first")
		inventory, err := s.inventory(s.Context(), m)
		must(s, err)
		must(s, m.Machine.Xid(inventory.Cards[s.CardOf(first)].UUID, 79))
		s.waitAllocatable(m, 16)
		s.Create(s.Pod("second", 16).OnNode(m.Name))
		s.rejected("second", "Insufficient "+string(protocol.ResourceMemory))
		s.remove("first")
		s.WaitAssigned("second")
	})
}

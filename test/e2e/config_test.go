package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/test/framework"
)

// TestNodeConfiguration changes what a node offers, by its label and by a file, while a pod runs there.
func TestNodeConfiguration(t *testing.T) {
	configs := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		text = "apiVersion: " + nodeconfig.APIVersion + "\nkind: " + nodeconfig.Kind + "\n" + text + "\n"
		must(t, os.WriteFile(filepath.Join(configs, "..new"), []byte(text), 0o644))
		must(t, os.Rename(filepath.Join(configs, "..new"), filepath.Join(configs, name)))
	}
	write("standard", "")
	write("half", "excludedCards: [{index: 1}]")
	c := shared.Start(t)
	m := addMachine(t, c, framework.NodeSpec{
		Name: "node", MemoryUnit: "GiB", Cards: []uint64{16384, 16384}, PluginArgs: []string{"--config=" + configs, "--default-config=standard"},
	})
	playOn(t, c, m, "a card is excluded and comes back", func(s *scene) {
		// cards waits until the node reports these cards: their memory by index, 0 if no new pod can use them.
		cards := func(want map[int]gpu.Memory) {
			s.Helper()
			s.Eventually(fmt.Sprintf("the node has the cards %v", want), func(ctx context.Context) error {
				inventory, err := s.inventory(ctx, m)
				got := map[int]gpu.Memory{}
				for _, card := range inventory.Cards {
					if got[card.Index] = card.Memory; !card.Healthy() {
						got[card.Index] = 0
					}
				}
				if err == nil && !cmp.Equal(want, got) {
					err = fmt.Errorf("it has %v", got)
				}
				return err
			})
		}
		label := func(config string) {
			s.Helper()
			patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, protocol.LabelConfig, config)
			_, err := c.Client.CoreV1().Nodes().Patch(s.Context(), m.Name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			must(s, err)
		}
		s.Place(s.Pod("large", 12).OnNode(m.Name))
		s.Place(s.Pod("small", 8).OnNode(m.Name))
		if card := s.CardOf(s.WaitAssigned("small")); card != 1 {
			s.Fatalf("the second pod has card %d", card)
		}
		label("half")
		cards(map[int]gpu.Memory{0: 16, 1: 0})
		s.waitAllocatable(m, 16)
		s.Create(s.Pod("waits", 8).OnNode(m.Name))
		s.rejected("waits", "Insufficient "+string(protocol.ResourceMemory))
		s.remove("waits", "small")
		cards(map[int]gpu.Memory{0: 16})

		// The file changes: the card is back, with less memory.
		write("half", "cardMemory: {byUUID: {"+m.Cards[1].UUID+": 8Gi}}")
		cards(map[int]gpu.Memory{0: 16, 1: 8})
		s.waitAllocatable(m, 24)
		s.Place(s.Pod("back", 8).OnNode(m.Name))
		if card := s.CardOf(s.WaitAssigned("back")); card != 1 {
			s.Errorf("the pod has card %d, want 1", card)
		}

		// A label without a configuration changes nothing.
		label("quarter")
		s.Eventually("the Event", func(ctx context.Context) error {
			list, err := c.Client.CoreV1().Events("").List(ctx, metav1.ListOptions{FieldSelector: "reason=GPUConfigRejected,involvedObject.name=" + m.Name})
			if err == nil && len(list.Items) == 0 {
				err = fmt.Errorf("there is none")
			}
			return err
		})
		cards(map[int]gpu.Memory{0: 16, 1: 8})
	})
}

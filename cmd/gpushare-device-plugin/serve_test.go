package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/inventory"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/nodeconfig"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// TestPrintedInventory: a printed inventory has the memory that the node's annotation has.
func TestPrintedInventory(t *testing.T) {
	for name, test := range map[string]struct {
		settings nodeconfig.Settings
		want     protocol.Inventory
	}{
		"mode none":        {nodeconfig.Settings{Isolation: isolation.None}, protocol.Inventory{Cards: []gpu.Card{{Memory: 16, Reserved: 1}, {Index: 1, Memory: 16}}}},
		"mode driver":      {nodeconfig.Settings{Isolation: isolation.Driver}, protocol.Inventory{Isolation: "driver", Cards: []gpu.Card{{Memory: 15, Reserved: 1}, {Index: 1, Memory: 16}}}},
		"an excluded card": {nodeconfig.Settings{Isolation: isolation.None, Excluded: nodeconfig.Cards{{Index: 1}}}, protocol.Inventory{Cards: []gpu.Card{{Memory: 16, Reserved: 1}}}},
	} {
		t.Run(name, func(t *testing.T) {
			test.want.Unit = gpu.GiB
			state := inventory.State{Unit: gpu.GiB, Cards: []gpu.Card{{Memory: 16, Reserved: 1}, {Index: 1, Memory: 16}}}
			if diff := cmp.Diff(test.want, inventoryOf(state, test.settings)); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
}

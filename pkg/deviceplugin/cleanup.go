package deviceplugin

import (
	"context"
	"fmt"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Cleanup takes from a node's object what the plugin, and nobody else, keeps there: the inventory and the number of
// cards. A plugin that still runs on the node writes both again.
func Cleanup(ctx context.Context, client Client, node string) error {
	none := map[string]any{string(protocol.ResourceCount): nil}
	err := patchNode(ctx, client, node, map[string]any{"status": map[string]any{"capacity": none, "allocatable": none}}, "status")
	if err != nil {
		return fmt.Errorf("taking %s from node %s: %w", protocol.ResourceCount, node, err)
	}
	err = patchNode(ctx, client, node, map[string]any{"metadata": map[string]any{
		"annotations": map[string]any{protocol.AnnotationInventory: nil},
	}})
	if err != nil {
		return fmt.Errorf("taking the inventory from node %s: %w", node, err)
	}
	return nil
}

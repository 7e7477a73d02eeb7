package deviceplugin

import (
	"context"
	"fmt"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Cleanup removes from a Node object what only the plugin writes there: the inventory and the number of cards. A plugin that
// still runs on the node writes both again.
func Cleanup(ctx context.Context, client Client, node string) error {
	if err := patchCards(ctx, client, node, nil, nil); err != nil {
		return fmt.Errorf("taking %s and the inventory from node %s: %w", protocol.ResourceCount, node, err)
	}
	return nil
}

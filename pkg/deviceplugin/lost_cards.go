package deviceplugin

import (
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// lostCards returns which cards of a pod the node doesn't have any more, for the pod's annotation; empty if it has all. A card of a pod can
// get another UUID, for example when a virtual machine is moved. The kubelet starts the pod's containers with the old one, which no
// longer exists. known is false if it isn't known what the containers were given, or which cards the node has.
func lostCards(given allocation.PodAllocations, cards []gpu.Card) (lost string, known bool) {
	var uuids []string
	for _, a := range given {
		uuids = append(uuids, a.UUIDs...)
	}
	if len(uuids) == 0 || len(cards) == 0 {
		return "", false
	}
	uuids = slices.DeleteFunc(uuids, func(uuid string) bool {
		return slices.ContainsFunc(cards, func(c gpu.Card) bool { return c.UUID == uuid })
	})
	slices.Sort(uuids)
	return strings.Join(slices.Compact(uuids), ","), true
}

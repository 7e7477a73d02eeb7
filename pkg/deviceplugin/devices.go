package deviceplugin

import (
	"math"
	"slices"
	"sort"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// maxMessage is the size in bytes of the largest ListAndWatch message that the kubelet accepts. It is gRPC's default, which the
// kubelet's client doesn't change (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/plugin/v1beta1/client.go). A larger message
// ends the stream and the node's allocatable drops to zero, while the registration still counts as successful.
const maxMessage = 4 << 20

// manyDevices is the number of devices from which the plugin warns of the kubelet's feature gate ResourceHealthStatus: with it, the kubelet searches
// the devices of all pods for each device that is new or has changed its health, in seconds to minutes (docs/units.md; k8s.io/kubernetes
// pkg/kubelet/cm/devicemanager/manager.go, genericDeviceUpdateCallback).
const manyDevices = 8000

// Device IDs contain numbers in base 62. The kubelet sends every single ID, checkpoints it and writes it to the pod's status,
// so each character costs.
//
// An ID is the card followed by the number of the unit on that card, without a separator: "1A0" is unit 620 of card 1. A card
// is one digit; cards from 61 on are 'z' and three digits. The unit has no leading zeros, so each unit has one ID.
const (
	digits     = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	base       = int64(len(digits))
	escape     = 'z' // The last digit.
	shortCards = int(base) - 1
)

// deviceID returns the ID of one unit of a card. card must be at least 0 and less than 62³.
func deviceID(card int, unit gpu.Memory) string {
	id := appendCard(make([]byte, 0, 16), card)
	start := len(id)
	for n := int64(unit); ; n /= base {
		id = append(id, digits[n%base])
		if n < base {
			break
		}
	}
	slices.Reverse(id[start:])
	return string(id)
}

// isDeviceID reports whether deviceID can have returned this ID.
func isDeviceID(id string) bool { return strings.Trim(id, digits) == "" }

// appendCard appends the prefix of the IDs of a card's units. No other card's IDs have this prefix.
func appendCard(id []byte, card int) []byte {
	if card < shortCards {
		return append(id, digits[card])
	}
	c := int64(card)
	return append(id, escape, digits[c/base/base%base], digits[c/base%base], digits[c%base])
}

// split counts how many devices of each of a container's cards are still to be taken.
type split struct {
	// prefixes are the cards' prefixes of the IDs of their units.
	prefixes []string
	left     []int
}

// newSplit returns the split of a number of devices, which is a multiple of the number of cards.
func newSplit(cards []int, devices int) *split {
	s := &split{}
	for _, card := range cards {
		s.prefixes = append(s.prefixes, string(appendCard(nil, card)))
		s.left = append(s.left, devices/len(cards))
	}
	return s
}

// take takes a device. It reports whether the device was still to be taken.
func (s *split) take(id string) bool {
	i := slices.IndexFunc(s.prefixes, func(prefix string) bool { return strings.HasPrefix(id, prefix) })
	if i < 0 || s.left[i] <= 0 {
		return false
	}
	s.left[i]--
	return true
}

// evenlyOf reports whether the devices are those of the cards, as many of each.
func evenlyOf(cards []int, ids []string) bool {
	split := newSplit(cards, len(ids))
	return !slices.ContainsFunc(ids, func(id string) bool { return !split.take(id) })
}

// devices returns one device for each unit of each card. The devices have no topology: with one, the kubelet's NUMA alignment
// would select devices of other cards than the one that was chosen for the pod.
func devices(cards []gpu.Card) []*pluginapi.Device {
	out := make([]*pluginapi.Device, 0, countDevices(cards))
	for _, c := range cards {
		health := pluginapi.Healthy
		if !c.Healthy() {
			health = pluginapi.Unhealthy
		}
		for unit := range c.Memory {
			out = append(out, &pluginapi.Device{ID: deviceID(c.Index, unit), Health: health})
		}
	}
	return out
}

// countDevices returns the number of devices of the cards.
func countDevices(cards []gpu.Card) (total gpu.Memory) {
	for _, c := range cards {
		total = total.Add(c.Memory)
	}
	return total
}

// messageSize returns the size in bytes of the largest ListAndWatch message for these cards. It is the message in which all
// devices are unhealthy, with 15 bytes and the ID per device.
func messageSize(cards []gpu.Card) int64 {
	const (
		perDevice = int64(4 + 2 + len(pluginapi.Unhealthy)) // Tag and length of the device, the ID and the health; and the health.
		maxUnits  = int64(1) << 40                          // Far above any limit. The sum must not wrap.
	)
	var size int64
	for _, c := range cards {
		units := int64(c.Memory)
		if units > maxUnits {
			return math.MaxInt64
		}
		size += units * (perDevice + int64(len(appendCard(nil, c.Index))))
		// Each unit has a digit, those from 62 on a second one, those from 3844 on a third one, …
		for from := int64(0); from < units; from = max(from, 1) * base {
			size += units - from
		}
	}
	return size
}

// smallestUnit returns the smallest multiple of the inventory's unit with which the cards fit into a message.
func smallestUnit(inventory protocol.Inventory) gpu.Unit {
	var largest gpu.Memory
	for _, c := range inventory.Cards {
		largest = max(largest, c.Memory)
	}
	// Rounding down to units and then to multiples of the unit gives the same as rounding down once, so the cards' memory in
	// bytes isn't needed.
	times := 1 + sort.Search(int(largest), func(i int) bool {
		cards := slices.Clone(inventory.Cards)
		for c := range cards {
			cards[c].Memory /= gpu.Memory(i + 1)
		}
		return messageSize(cards) <= maxMessage
	})
	return inventory.Unit * gpu.Unit(times)
}

package deviceplugin

import (
	"fmt"
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

// Device IDs contain numbers in base 62. The kubelet sends every single ID, checkpoints it and writes it to the pod's status,
// so each character costs.
//
// An ID is the card followed by the number of the unit on that card, without a separator: "1A0" is unit 620 of card 1. A card
// is one digit; cards from 61 on are 'z' and three digits. The unit has no leading zeros, so each unit has one ID and each ID
// has at most one meaning.
const (
	digits     = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	base       = int64(len(digits))
	escape     = 'z' // The last digit.
	shortCards = int(base) - 1
	maxCards   = int(base * base * base)
)

// deviceID returns the ID of one unit of a card. card must be at least 0 and less than maxCards.
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

// appendCard appends the prefix of the IDs of a card's units. No other card's IDs have this prefix.
func appendCard(id []byte, card int) []byte {
	if card < shortCards {
		return append(id, digits[card])
	}
	c := int64(card)
	return append(id, escape, digits[c/base/base%base], digits[c/base%base], digits[c%base])
}

// ofCard returns a function that reports whether an ID of this plugin is the ID of one of the card's units.
func ofCard(card int) func(id string) bool {
	prefix := string(appendCard(nil, card))
	return func(id string) bool { return strings.HasPrefix(id, prefix) }
}

// parseDeviceID parses an ID that deviceID returned. For any other string it returns an error.
func parseDeviceID(id string) (card int, unit gpu.Memory, err error) {
	bad := func() (int, gpu.Memory, error) {
		return 0, 0, fmt.Errorf("%.32q is not a device ID of this plugin", id)
	}
	prefix, number := 1, int64(0)
	if strings.HasPrefix(id, string(escape)) {
		prefix = 4
	}
	if len(id) <= prefix {
		return bad()
	}
	for i := range len(id) {
		digit := int64(strings.IndexByte(digits, id[i]))
		switch {
		case digit < 0 || number > (math.MaxInt64-digit)/base:
			return bad()
		case i == 0 && prefix > 1:
			// The escape digit has no value.
		case i < prefix:
			card = card*int(base) + int(digit)
		default:
			number = number*base + digit
		}
	}
	if deviceID(card, gpu.Memory(number)) != id {
		return bad() // Leading zeros, or the long form of a card that has a short one.
	}
	return card, gpu.Memory(number), nil
}

// devices returns one device for each unit of each card. The devices have no topology: with one, the kubelet's NUMA alignment
// would select devices of other cards than the one that was chosen for the pod.
func devices(cards []gpu.Card) []*pluginapi.Device {
	var total gpu.Memory
	for _, c := range cards {
		total = total.Add(c.Memory)
	}
	out := make([]*pluginapi.Device, 0, total)
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

// messageSize returns the size in bytes of the largest ListAndWatch message for these cards. It is the message in which all
// devices are unhealthy, with 15 bytes and the ID per device.
func messageSize(cards []gpu.Card) int64 {
	const perDevice = int64(4 + 2 + len(pluginapi.Unhealthy)) // Tag and length of the device, the ID and the health; and the health.
	var size int64
	for _, c := range cards {
		prefix := int64(1)
		if c.Index >= shortCards {
			prefix = 4
		}
		// Each pass covers the numbers of one length: [0, 62), [62, 3844), …
		for low, high, length := int64(0), base, int64(1); low < int64(c.Memory); length++ {
			count := min(high, int64(c.Memory)) - low
			if count > math.MaxInt64/64 || size > math.MaxInt64/2 {
				return math.MaxInt64 // Far above any limit. The sum must not wrap.
			}
			size += count * (perDevice + prefix + length)
			low = high
			if high > math.MaxInt64/base {
				high = math.MaxInt64
			} else {
				high *= base
			}
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

// deviceSet represents a set of device IDs. Equal sets have equal values, whatever the order of the IDs. A pod can have many
// thousands of IDs, so the IDs themselves aren't kept: the value is their number and the sums of two hashes of each ID. Only
// this plugin chooses IDs, so two different sets can have the same value by chance only.
type deviceSet [3]uint64

func newDeviceSet(ids []string) deviceSet {
	set := deviceSet{uint64(len(ids))}
	for _, id := range ids {
		// FNV-1a, with its bits mixed as in SplitMix64 so that sums don't cancel out.
		hash := uint64(14695981039346656037)
		for i := range len(id) {
			hash = (hash ^ uint64(id[i])) * 1099511628211
		}
		set[1] += mix(hash)
		set[2] += mix(hash + 0x9e3779b97f4a7c15)
	}
	return set
}

func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

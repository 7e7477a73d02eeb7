package inventory

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
)

// CardMemory is the memory of cards as the administrator sets it, in bytes. It is meant for cards that share the machine's
// memory, for which the driver reports no memory. The zero value sets no card's memory.
type CardMemory struct {
	every  uint64
	byUUID map[string]uint64
}

// ParseCardMemory parses one size for all cards, such as 96Gi, or a comma-separated list of UUID=size. An empty text sets
// nothing. A size must be positive, and a UUID may occur once.
func ParseCardMemory(text string) (CardMemory, error) {
	if text == "" {
		return CardMemory{}, nil
	}
	if !strings.Contains(text, "=") {
		return NewCardMemory(text, nil)
	}
	sizes := map[string]string{}
	for entry := range strings.SplitSeq(text, ",") {
		uuid, size, _ := strings.Cut(strings.TrimSpace(entry), "=")
		if uuid == "" {
			return CardMemory{}, fmt.Errorf("%q: want UUID=size", entry)
		}
		if _, twice := sizes[uuid]; twice {
			return CardMemory{}, fmt.Errorf("%s is listed twice", uuid)
		}
		sizes[uuid] = size
	}
	return NewCardMemory("", sizes)
}

// NewCardMemory returns the memory of cards from one size for all cards, such as 96Gi, and sizes by UUID, which take
// precedence. The size for all can be empty. A size must be positive.
func NewCardMemory(all string, byUUID map[string]string) (memory CardMemory, err error) {
	if all != "" {
		if memory.every, err = parseSize(all); err != nil {
			return CardMemory{}, err
		}
	}
	for _, uuid := range slices.Sorted(maps.Keys(byUUID)) {
		bytes, err := parseSize(byUUID[uuid])
		if err != nil {
			return CardMemory{}, fmt.Errorf("%s: %w", uuid, err)
		}
		if memory.byUUID == nil {
			memory.byUUID = map[string]uint64{}
		}
		memory.byUUID[uuid] = bytes
	}
	return memory, nil
}

func parseSize(text string) (uint64, error) {
	quantity, err := resource.ParseQuantity(text)
	if err != nil {
		return 0, fmt.Errorf("size %q: want one such as 96Gi: %w", text, err)
	}
	if quantity.Value() <= 0 {
		return 0, errors.New("a size must be positive")
	}
	return uint64(quantity.Value()), nil
}

// of returns the memory of a card in bytes. reported is the memory that the driver reports; 0 if it reports none. The
// result never exceeds reported, unless reported is 0.
func (m CardMemory) of(uuid string, reported uint64) uint64 {
	said, ok := m.byUUID[uuid]
	if !ok {
		said = m.every
	}
	if said == 0 || reported != 0 && reported < said {
		return reported
	}
	return said
}

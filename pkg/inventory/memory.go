package inventory

import (
	"errors"
	"fmt"
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
		every, err := parseSize(text)
		return CardMemory{every: every}, err
	}
	memory := CardMemory{byUUID: map[string]uint64{}}
	for entry := range strings.SplitSeq(text, ",") {
		uuid, size, _ := strings.Cut(strings.TrimSpace(entry), "=")
		if uuid == "" {
			return CardMemory{}, fmt.Errorf("%q: want UUID=size", entry)
		}
		if _, twice := memory.byUUID[uuid]; twice {
			return CardMemory{}, fmt.Errorf("%s is listed twice", uuid)
		}
		bytes, err := parseSize(size)
		if err != nil {
			return CardMemory{}, fmt.Errorf("%s: %w", uuid, err)
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

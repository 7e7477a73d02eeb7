package gpu

import (
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"strings"
)

// Unit is the number of bytes in one unit of a node's GPU memory, 1 in `aliyun.com/gpu-mem: 1`. Count turns a card's bytes
// into units. The kubelet counts devices: the function devices of package deviceplugin makes one device of each unit.
type Unit int64

// Named units. Any whole number of MiB or GiB is a unit as well ("256MiB").
const (
	MiB Unit = 1 << 20
	GiB Unit = 1 << 30
)

// ParseUnit parses "GiB", "MiB", or a whole number of either such as "256MiB". It is strict, because a wrong unit
// miscounts every card of a node.
func ParseUnit(s string) (Unit, error) {
	base, digits := Unit(0), ""
	switch {
	case strings.HasSuffix(s, "GiB"):
		base, digits = GiB, strings.TrimSuffix(s, "GiB")
	case strings.HasSuffix(s, "MiB"):
		base, digits = MiB, strings.TrimSuffix(s, "MiB")
	default:
		return 0, fmt.Errorf("memory unit %.32q: want GiB, MiB, or a number of them such as 256MiB", s)
	}
	if digits == "" {
		return base, nil
	}
	n, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || n <= 0 || digits[0] == '+' || digits[0] == '0' || n > math.MaxInt64/int64(base) {
		return 0, fmt.Errorf("memory unit %.32q: want a positive whole number before the unit, below 2^63 bytes in all", s)
	}
	return Unit(n) * base, nil
}

// String returns the shortest form that ParseUnit accepts, or the number of bytes if that isn't a whole number of MiB.
func (u Unit) String() string {
	for _, named := range []struct {
		unit Unit
		name string
	}{{GiB, "GiB"}, {MiB, "MiB"}} {
		switch {
		case u == named.unit:
			return named.name
		case u > 0 && u%named.unit == 0:
			return strconv.FormatInt(int64(u/named.unit), 10) + named.name
		}
	}
	return strconv.FormatInt(int64(u), 10) + "B"
}

// MarshalText returns String for JSON and YAML, and nothing for the zero Unit, which is unknown.
func (u Unit) MarshalText() ([]byte, error) {
	if u == 0 {
		return nil, nil
	}
	return []byte(u.String()), nil
}

// Count returns the number of whole units in bytes. The remainder can't be allocated.
func (u Unit) Count(bytes uint64) Memory {
	if u <= 0 {
		return 0
	}
	n := bytes / uint64(u)
	if n > math.MaxInt64 {
		return math.MaxInt64
	}
	return Memory(n)
}

// Bytes returns the number of bytes of m units, or the largest number if the product overflows.
func (u Unit) Bytes(m Memory) uint64 {
	high, low := bits.Mul64(uint64(max(u, 0)), uint64(max(m, 0)))
	if high != 0 {
		return math.MaxUint64
	}
	return low
}

// Format formats an amount for display: "8138 MiB", "3 x 256MiB", or only the number if the unit is unknown.
func (u Unit) Format(m Memory) string {
	switch {
	case u <= 0:
		return m.String()
	case u == MiB || u == GiB:
		return m.String() + " " + u.String()
	}
	return m.String() + " x " + u.String()
}

// UnitOf returns the unit that a node reports. If it reports none, UnitOf derives it from the cards: only plugins that
// count in GiB or MiB report none, and a card has less than 1024 GiB and at least 1024 MiB.
func UnitOf(reported Unit, cards []Card) Unit {
	if reported > 0 {
		return reported
	}
	for _, card := range cards {
		if card.Memory >= 1024 {
			return MiB
		}
	}
	return GiB
}

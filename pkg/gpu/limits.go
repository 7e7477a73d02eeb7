package gpu

import "math"

// Limits are what a pod's limits above its requests demand of a node. The zero value is that of a pod without such limits. Requests are in the
// node's unit and limits in bytes, so nodes differ in which limits they can serve. Amounts are in MiB, since the extender keeps many.
type Limits struct {
	// Largest is the largest limit of a container on one card, at least 1.
	Largest uint32
	// MaxUnit is the largest unit of a node on which no container requests more than its limit.
	MaxUnit uint32
}

// With returns the limits and that of one more container: in bytes, over this number of cards, beside a positive request.
func (l Limits) With(limit uint64, request Memory, cards int) Limits {
	unit := mebibytes(limit / uint64(request))
	if l != (Limits{}) {
		unit = min(unit, l.MaxUnit)
	}
	return Limits{max(l.Largest, mebibytes(limit/uint64(max(cards, 1))), 1), unit}
}

func mebibytes(bytes uint64) uint32 { return uint32(min(bytes/uint64(MiB), math.MaxUint32)) }

package gpu

import (
	"math"
	"strconv"
)

// Memory is an amount of GPU memory, counted in the unit of the node that it is on (see Unit). It is never negative:
// the arithmetic below stops at zero and at the largest value instead of wrapping, so a card that holds more than it
// has (which other schedulers can bring about) has nothing free rather than a huge amount.
type Memory int64

// NewMemory returns n, or zero where n is negative.
func NewMemory(n int64) Memory {
	return Memory(max(n, 0))
}

// Add returns m+o, or the largest Memory where the sum would pass it.
func (m Memory) Add(o Memory) Memory {
	if o > math.MaxInt64-m {
		return math.MaxInt64
	}
	return m + o
}

// Sub returns m-o, or zero where o is larger.
func (m Memory) Sub(o Memory) Memory {
	return max(m-o, 0)
}

// String returns the bare number, as annotations and environment variables carry it.
func (m Memory) String() string {
	return strconv.FormatInt(int64(m), 10)
}

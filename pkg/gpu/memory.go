package gpu

import (
	"math"
	"strconv"
)

// Memory is an amount of GPU memory in the unit of its node (see Unit). It is never negative: its arithmetic saturates at
// zero and at the largest value instead of wrapping. So a card with more allocated than it has (which another scheduler
// can cause) has nothing free, not a huge amount.
type Memory int64

// NewMemory returns n, or zero if n is negative.
func NewMemory(n int64) Memory {
	return Memory(max(n, 0))
}

// Add returns m+o, or the largest Memory if the sum overflows.
func (m Memory) Add(o Memory) Memory {
	if o > math.MaxInt64-m {
		return math.MaxInt64
	}
	return m + o
}

// Sub returns m-o, or zero if o is larger.
func (m Memory) Sub(o Memory) Memory {
	return max(m-o, 0)
}

// String returns the number without a unit, as in annotations and environment variables.
func (m Memory) String() string {
	return strconv.FormatInt(int64(m), 10)
}

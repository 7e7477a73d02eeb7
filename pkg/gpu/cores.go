package gpu

import (
	"math"
	"strconv"
)

// Cores is an amount of a card's computing, in percent of one card. It is never negative, and its arithmetic saturates like
// that of Memory.
type Cores int32

// CardCores is the computing of one card.
const CardCores Cores = 100

// NewCores returns n within the bounds of Cores.
func NewCores(n int64) Cores { return Cores(min(max(n, 0), math.MaxInt32)) }

// Add returns c+o, or the largest Cores if the sum overflows.
func (c Cores) Add(o Cores) Cores { return NewCores(int64(c) + int64(o)) }

// Sub returns c-o, or zero if o is larger.
func (c Cores) Sub(o Cores) Cores { return max(c-o, 0) }

// String returns the number without a unit, as in resources and environment variables.
func (c Cores) String() string { return strconv.Itoa(int(c)) }

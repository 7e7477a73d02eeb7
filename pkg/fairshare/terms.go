package fairshare

import (
	"fmt"
	"strconv"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// ParseWeight parses a tenant's weight: a whole number from 1 to MaxWeight.
func ParseWeight(text string) (int64, error) {
	weight, err := strconv.ParseInt(text, 10, 64)
	if err != nil || weight < 1 || weight > MaxWeight {
		return 0, fmt.Errorf("%.32q is not a whole number from 1 to %d", text, MaxWeight)
	}
	return weight, nil
}

// ParseGuaranteed parses a tenant's guaranteed amount: a whole number of units from 0 to MaxGuaranteed.
func ParseGuaranteed(text string) (gpu.Memory, error) {
	amount, err := strconv.ParseInt(text, 10, 64)
	if err != nil || amount < 0 || gpu.Memory(amount) > MaxGuaranteed {
		return 0, fmt.Errorf("%.32q is not a whole number from 0 to %d", text, MaxGuaranteed)
	}
	return gpu.Memory(amount), nil
}

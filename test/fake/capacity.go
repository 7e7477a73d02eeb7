package fake

import "github.com/gpushare/gpushare/pkg/gpu"

// Enough is a reclaim.Capacity that has room for everything.
type Enough struct{}

// Take implements ledger.Capacity.
func (Enough) Take(string, gpu.PodUID) bool { return true }

// Return implements ledger.Capacity.
func (Enough) Return(string, gpu.PodUID) {}

// Evict implements reclaim.Capacity.
func (Enough) Evict(string, gpu.PodUID) {}

// Restore implements reclaim.Capacity.
func (Enough) Restore(string, gpu.PodUID) bool { return true }

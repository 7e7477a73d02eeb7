package fake

import (
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Resources is a ledger.Resources by its answer to Fits. It knows nothing else of the pods.
type Resources func(q ledger.ResourceQuery) bool

// Fits implements ledger.Resources.
func (f Resources) Fits(q ledger.ResourceQuery) bool { return f(q) }

// Shape implements ledger.Resources.
func (Resources) Shape(gpu.PodUID) (shape placement.Shape, ok bool) { return shape, false }

// Requests implements ledger.Resources.
func (Resources) Requests(gpu.PodUID) string { return "" }

// LargestPart implements ledger.Resources.
func (Resources) LargestPart(string, []gpu.PodUID) float64 { return 0 }

package placement

import (
	"math/rand/v2"
	"testing"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// BenchmarkCosts measures the costs of 64 kinds on a node of eight cards that are full to half or to 90%.
func BenchmarkCosts(b *testing.B) {
	for name, used := range map[string]gpu.Memory{"half": 8000, "full": 14000} {
		b.Run(name, func(b *testing.B) {
			random := rand.New(rand.NewPCG(1, 2))
			n := NodeRoom{Cards: full(), NodeResources: NodeResources{CPU: 32000, NodeMemory: 64 << 30}}
			var kinds []Kind
			for i := range n.Cards {
				n.Cards[i].Used = used + gpu.Memory(100*i)
			}
			for range MaxKinds {
				shape := Shape{Demand: units(gpu.Memory(50 + random.IntN(2000))), NodeResources: NodeResources{CPU: 1000 * random.Int64N(16), NodeMemory: random.Int64N(32) << 30}}
				kinds = append(kinds, Kind{Shape: shape, Frequency: random.Float64()})
			}
			o := NewOutlook(kinds, 1, Binpack, []NodeRoom{n})
			b.ReportAllocs()
			for b.Loop() {
				o.Costs(&n)
			}
		})
	}
}

package fairshare

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Pools are parts of a cluster's memory. All memory of one pool can be used by the same pods.
type Pools struct {
	// Sizes are the amounts of the pools.
	Sizes []gpu.Memory
	// Classes holds, for each class of pods, the pools that these pods can use, as positions in Sizes.
	Classes [][]int
}

// Shares divides the pools among the claims and returns the shares, like the function Shares, but accurate to about a unit. demands holds
// each claim's demand by class. A tenant whose pods can use only small pools may get less than by its terms alone. Then the others divide the
// rest. The result is max-min fair: beyond the guaranteed amounts, no share can be raised without lowering another share that
// is not larger in proportion to its weight. All shares together fit the pools.
func (p Pools) Shares(claims []Claim, demands [][]gpu.Memory) []gpu.Memory {
	d := division{p, claims, demands, make([]gpu.Memory, len(claims)), make([]bool, len(claims))}
	open := make([]int, len(claims))
	for i := range open {
		open[i] = i
	}
	d.divide(open)
	return d.shares
}

// division is the state of Pools.Shares: the shares of some claims are final.
type division struct {
	Pools
	claims  []Claim
	demands [][]gpu.Memory
	shares  []gpu.Memory
	final   []bool
}

// divide computes the shares of the open claims, when some shares are final already. First it divides the memory that the final shares leave
// as if all claims could use all of it. If the result can't be placed, some claims compete for pools that are too small for them. For these
// claims, divide computes the shares separately: together they get all memory of these pools, which is less than the
// first division gave them. The other open claims don't need these pools, and divide what is left. This is the decomposition algorithm
// for polymatroids (H. Groenevelt, Two algorithms for maximizing a separable concave function over a polymatroid feasible region,
// 1991).
func (d *division) divide(open []int) {
	if len(open) == 0 {
		return
	}
	claims := make([]Claim, len(open))
	for i, claim := range open {
		claims[i] = d.claims[claim]
		d.shares[claim] = claims[i].Demand
	}
	total, _ := d.fit(open)
	for i, share := range Shares(total, claims) {
		d.shares[open[i]] = share
	}
	placed, lacking := d.fit(open)
	competing := slices.DeleteFunc(slices.Clone(open), func(claim int) bool { return !lacking[claim] })
	// The last two conditions can't be true. They prevent an endless recursion if there is a defect.
	if placed == total || len(competing) == 0 || len(competing) == len(open) {
		for _, claim := range open {
			d.final[claim] = true
		}
		return
	}
	d.divide(competing)
	d.divide(slices.DeleteFunc(open, func(claim int) bool { return lacking[claim] }))
}

// fit places the final shares, and as much as possible of the shares of the open claims. It returns how much of the open claims' shares was
// placed, and the claims that compete for pools that were too small.
func (d *division) fit(open []int) (placed gpu.Memory, lacking []bool) {
	const source, sink, first = 0, 1, 2
	pools := first + len(d.claims)
	classes := pools + len(d.Sizes)
	f := newFlow(classes + len(d.Classes))
	for i, size := range d.Sizes {
		f.connect(pools+i, sink, size)
	}
	for i, class := range d.Classes {
		for _, pool := range class {
			f.connect(classes+i, pools+pool, unlimited)
		}
	}
	supply := func(claim int) {
		f.connect(source, first+claim, d.shares[claim])
		for class, demand := range d.demands[claim] {
			if demand > 0 {
				f.connect(first+claim, classes+class, demand)
			}
		}
	}
	for claim, final := range d.final {
		if final {
			supply(claim)
		}
	}
	f.maximize(source, sink)
	for _, claim := range open {
		supply(claim)
	}
	placed = f.maximize(source, sink)
	lacking = make([]bool, len(d.claims))
	for claim := range d.claims {
		lacking[claim] = f.lengths[first+claim] != unreached
	}
	return placed, lacking
}

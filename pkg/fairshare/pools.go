package fairshare

import (
	"slices"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Pools are the parts of a cluster's memory that differ in which pods can use them.
type Pools struct {
	// Sizes are the amounts of the pools.
	Sizes []gpu.Memory
	// Classes are classes of pods: each holds the pools that its pods can use, as positions in Sizes.
	Classes [][]int
}

// Shares divides the pools among the claims and returns the shares, like the function Shares, to about a unit. demands holds
// the parts of each claim's demand by class. A tenant whose pods can use only small pools may get less than its terms would give it, and the
// others divide the rest. The result is max-min fair: beyond the guaranteed amounts, no share can be raised without lowering one that
// is not larger in proportion to its weight. Together the shares fit the pools.
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

// divide computes the shares of the open claims, beside those that are final. It divides what these leave as if all of it could
// be used by all. If these shares can't be placed, some claims compete for pools that are too small for them. They are divided first,
// without the other open claims, which don't need these pools: together they get all that the pools have, which is less than the
// first division gave them. Then the other claims divide what is left. It is the decomposition algorithm
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
	if placed == total || len(competing) == 0 || len(competing) == len(open) { // The last two can't be, and would never end.
		for _, claim := range open {
			d.final[claim] = true
		}
		return
	}
	d.divide(competing)
	d.divide(slices.DeleteFunc(open, func(claim int) bool { return lacking[claim] }))
}

// fit places the shares of the claims that are final, and as much as possible of those of the open ones. It returns how much of the
// open ones was placed, and the claims that compete for the room that wasn't enough.
func (d *division) fit(open []int) (placed gpu.Memory, lacking []bool) {
	const source, sink, first = 0, 1, 2
	pools := first + len(d.claims)
	classes := pools + len(d.Sizes)
	f := newFlow(classes + len(d.Classes))
	for i, size := range d.Sizes {
		f.connect(pools+i, sink, size, 0)
	}
	for i, class := range d.Classes {
		for _, pool := range class {
			f.connect(classes+i, pools+pool, unlimited, 0)
		}
	}
	supply := func(claim int) {
		f.connect(source, first+claim, d.shares[claim], 0)
		for class, demand := range d.demands[claim] {
			if demand > 0 {
				f.connect(first+claim, classes+class, demand, 0)
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

// Holding is what a tenant's pods of one class have and wait for.
type Holding struct {
	// Tenant and Class are positions in the limits and in Pools.Classes.
	Tenant, Class int
	Demand        gpu.Memory
	// Has is what they have in each pool, part of Demand.
	Has []gpu.Memory
}

// Assign divides the pools among the holdings so that each tenant gets its limit, if there is room for all, and as much as possible stays
// where it is. It returns what each holding gets in each pool.
func (p Pools) Assign(limits []gpu.Memory, holdings []Holding) [][]gpu.Memory {
	const source, sink, first = 0, 1, 2
	pools := first + len(limits)
	own := pools + len(p.Sizes)
	f := newFlow(own + len(holdings))
	for tenant, limit := range limits {
		f.connect(source, first+tenant, limit, 0)
	}
	for i, size := range p.Sizes {
		f.connect(pools+i, sink, size, 0)
	}
	type grant struct{ holding, pool, edge int }
	var grants []grant
	for i, h := range holdings {
		f.connect(first+h.Tenant, own+i, h.Demand, 0)
		for pool, amount := range h.Has {
			if amount > 0 {
				grants = append(grants, grant{i, pool, f.connect(own+i, pools+pool, amount, 0)})
			}
		}
		for _, pool := range p.Classes[h.Class] {
			grants = append(grants, grant{i, pool, f.connect(own+i, pools+pool, unlimited, 1)})
		}
	}
	f.maximize(source, sink)
	out := make([][]gpu.Memory, len(holdings))
	for i := range out {
		out[i] = make([]gpu.Memory, len(p.Sizes))
	}
	for _, g := range grants {
		out[g.holding][g.pool] += f.through(g.edge)
	}
	return out
}

package fairshare

import (
	"math"
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

// Shares divides the pools among the tenants and returns the shares, like the function Shares, but accurate to about a unit. demands holds
// each tenant's demand by class. A tenant whose pods can use only small pools may get less than by its terms alone. Then the others divide the
// rest. The result is max-min fair: beyond the guaranteed amounts, no share can be raised without lowering another share that
// is not larger in proportion to its weight. All shares together fit the pools.
func (p Pools) Shares(tenants []Tenant, demands [][]gpu.Memory) []gpu.Memory {
	d := division{p, tenants, demands, make([]gpu.Memory, len(tenants)), make([]bool, len(tenants))}
	open := make([]int, len(tenants))
	for i := range open {
		open[i] = i
	}
	d.divide(open)
	return d.shares
}

// division is the state of Pools.Shares: the shares of some tenants are final.
type division struct {
	Pools
	tenants []Tenant
	demands [][]gpu.Memory
	shares  []gpu.Memory
	final   []bool
}

// divide computes the shares of the open tenants, when some shares are final already. First it divides the memory that the final shares leave
// as if all tenants could use all of it. If the result can't be placed, some tenants compete for pools that are too small for them. For these
// tenants, divide computes the shares separately: together they get all memory of these pools, which is less than the
// first division gave them. The other open tenants don't need these pools, and divide what is left. This is the decomposition algorithm
// for polymatroids (H. Groenevelt, Two algorithms for maximizing a separable concave function over a polymatroid feasible region,
// 1991).
func (d *division) divide(open []int) {
	if len(open) == 0 {
		return
	}
	tenants := make([]Tenant, len(open))
	for i, tenant := range open {
		tenants[i] = d.tenants[tenant]
		d.shares[tenant] = tenants[i].Demand
	}
	total, _ := d.fit(open)
	for i, share := range Shares(total, tenants) {
		d.shares[open[i]] = share
	}
	placed, lacking := d.fit(open)
	competing := slices.DeleteFunc(slices.Clone(open), func(tenant int) bool { return !lacking[tenant] })
	// The last two conditions can't be true. They prevent an endless recursion if there is a defect.
	if placed == total || len(competing) == 0 || len(competing) == len(open) {
		for _, tenant := range open {
			d.final[tenant] = true
		}
		return
	}
	d.divide(competing)
	d.divide(slices.DeleteFunc(open, func(tenant int) bool { return lacking[tenant] }))
}

// fit places the final shares, and as much as possible of the shares of the open tenants. It returns how much of the open tenants' shares was
// placed, and the tenants that compete for pools that were too small.
func (d *division) fit(open []int) (placed gpu.Memory, lacking []bool) {
	const source, sink, first = 0, 1, 2
	pools := first + len(d.tenants)
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
	supply := func(tenant int) {
		f.connect(source, first+tenant, d.shares[tenant])
		for class, demand := range d.demands[tenant] {
			if demand > 0 {
				f.connect(first+tenant, classes+class, demand)
			}
		}
	}
	for tenant, final := range d.final {
		if final {
			supply(tenant)
		}
	}
	f.maximize(source, sink)
	for _, tenant := range open {
		supply(tenant)
	}
	placed = f.maximize(source, sink)
	lacking = make([]bool, len(d.tenants))
	for tenant := range d.tenants {
		lacking[tenant] = f.tried[first+tenant]
	}
	return placed, lacking
}

// unlimited is the capacity of an edge without a limit. Some of them add up without an overflow.
const unlimited = gpu.Memory(math.MaxInt64 / 4)

// flow is a network with a flow. Its nodes are numbers from 0 on.
type flow struct {
	// from holds the positions of the edges that leave each node.
	from  [][]int
	edges []edge
	// tried are the nodes that the latest search has reached, but not those on its paths to the sink. At the end of maximize, more can flow to these only.
	tried []bool
}

// edge is a direction of a connection. The opposite one is at the position that differs in the last bit.
type edge struct {
	to int
	// left is how much more can flow.
	left gpu.Memory
}

func newFlow(nodes int) *flow { return &flow{from: make([][]int, nodes), tried: make([]bool, nodes)} }

// connect adds an edge.
func (f *flow) connect(from, to int, capacity gpu.Memory) {
	n := len(f.edges)
	f.edges = append(f.edges, edge{to, capacity}, edge{from, 0})
	f.from[from], f.from[to] = append(f.from[from], n), append(f.from[to], n+1)
}

// maximize increases the flow as far as possible, and returns by how much. What flows out of the source along an edge never decreases. It fills wide
// paths first, so that the number of searches depends little on the amounts (capacity scaling).
func (f *flow) maximize(source, sink int) (more gpu.Memory) {
	for least := unlimited; least > 0; least /= 2 {
		for sent := least; sent > 0; more += sent {
			clear(f.tried)
			sent = f.push(source, sink, unlimited, least)
		}
	}
	return more
}

// push sends up to the amount from a node to the sink along edges on which at least that much more can flow, and returns how much.
func (f *flow) push(n, sink int, amount, least gpu.Memory) (sent gpu.Memory) {
	if n == sink {
		return amount
	}
	f.tried[n] = true
	for _, i := range f.from[n] {
		e := &f.edges[i]
		if e.left < least || f.tried[e.to] {
			continue
		}
		more := f.push(e.to, sink, min(amount-sent, e.left), least)
		e.left -= more
		f.edges[i^1].left += more
		sent += more
		if sent == amount {
			f.tried[n] = false
			break
		}
	}
	return sent
}

package fairshare

import (
	"math"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// unlimited is the capacity of an edge without a limit. Some of them add up without an overflow.
const unlimited = gpu.Memory(math.MaxInt64 / 4)

// flow is a network with a flow of the least cost for its amount. Its nodes are numbers from 0 on.
type flow struct {
	// from holds the positions of the edges that leave each node.
	from  [][]int
	edges []edge
	// by, costs, queued and queue belong to cheapest.
	by, costs []int
	queued    []bool
	queue     []int
}

// edge is a direction of a connection. The opposite one is at the position that differs in the last bit.
type edge struct {
	to int
	// left is how much more can flow.
	left gpu.Memory
	cost int
}

func newFlow(nodes int) *flow {
	return &flow{from: make([][]int, nodes), by: make([]int, nodes), costs: make([]int, nodes), queued: make([]bool, nodes)}
}

// connect adds an edge and returns its position.
func (f *flow) connect(from, to int, capacity gpu.Memory, cost int) int {
	n := len(f.edges)
	f.edges = append(f.edges, edge{to, capacity, cost}, edge{from, 0, -cost})
	f.from[from], f.from[to] = append(f.from[from], n), append(f.from[to], n+1)
	return n
}

// through returns what flows through an edge.
func (f *flow) through(edge int) gpu.Memory { return f.edges[edge^1].left }

// maximize increases the flow as far as possible, and returns by how much. What flows out of the source along an edge never
// decreases.
func (f *flow) maximize(source, sink int) (more gpu.Memory) {
	for {
		by := f.cheapest(source)
		if by[sink] < 0 {
			return more
		}
		amount := unlimited
		for n := sink; n != source; n = f.edges[by[n]^1].to {
			amount = min(amount, f.edges[by[n]].left)
		}
		for n := sink; n != source; n = f.edges[by[n]^1].to {
			f.edges[by[n]].left -= amount
			f.edges[by[n]^1].left += amount
		}
		more += amount
	}
}

// cheapest returns for each node the last edge of the cheapest path to it along which more can flow, -1 if there is none. The
// result is valid until the next call. It is the algorithm of Bellman and Ford with a queue.
func (f *flow) cheapest(source int) (by []int) {
	const never = math.MaxInt
	for n := range f.by {
		f.by[n], f.costs[n] = -1, never
	}
	f.costs[source], f.queue = 0, append(f.queue[:0], source)
	for next := 0; next < len(f.queue); next++ {
		n := f.queue[next]
		f.queued[n] = false
		for _, i := range f.from[n] {
			e := &f.edges[i]
			if e.left == 0 || f.costs[n]+e.cost >= f.costs[e.to] {
				continue
			}
			if f.by[e.to], f.costs[e.to] = i, f.costs[n]+e.cost; !f.queued[e.to] {
				f.queue, f.queued[e.to] = append(f.queue, e.to), true
			}
		}
	}
	return f.by
}

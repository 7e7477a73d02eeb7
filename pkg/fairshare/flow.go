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
	// lengths are those of the paths that the latest search found, unreached for nodes to which nothing more can flow.
	lengths []int
	// tried is how many edges of each node push has tried since then.
	tried []int
	// queued and queue belong to search.
	queued []bool
	queue  []int
}

const unreached = math.MaxInt

// edge is a direction of a connection. The opposite one is at the position that differs in the last bit.
type edge struct {
	to int
	// left is how much more can flow.
	left gpu.Memory
	cost int
}

func newFlow(nodes int) *flow {
	return &flow{from: make([][]int, nodes), lengths: make([]int, nodes), tried: make([]int, nodes), queued: make([]bool, nodes)}
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
// decreases. Each search serves all shortest paths, as in Dinic's algorithm, but the cost comes before the number of edges.
func (f *flow) maximize(source, sink int) (more gpu.Memory) {
	for f.search(source); f.lengths[sink] != unreached; f.search(source) {
		clear(f.tried)
		more += f.push(source, sink, unlimited)
	}
	return more
}

// length returns the length of an edge: first its cost counts, then that it is one more edge.
func (f *flow) length(e *edge) int { return e.cost*len(f.from) + 1 }

// search finds the shortest paths from the source along which more can flow. It is the algorithm of Bellman and Ford with a queue.
func (f *flow) search(source int) {
	for n := range f.lengths {
		f.lengths[n] = unreached
	}
	f.lengths[source], f.queue = 0, append(f.queue[:0], source)
	for next := 0; next < len(f.queue); next++ {
		n := f.queue[next]
		f.queued[n] = false
		for _, i := range f.from[n] {
			e := &f.edges[i]
			if e.left == 0 || f.lengths[n]+f.length(e) >= f.lengths[e.to] {
				continue
			}
			if f.lengths[e.to] = f.lengths[n] + f.length(e); !f.queued[e.to] {
				f.queue, f.queued[e.to] = append(f.queue, e.to), true
			}
		}
	}
}

// push sends up to the amount from a node to the sink along shortest paths, and returns how much. These paths have no cycles: a cycle of
// the network costs at least 0, and has edges.
func (f *flow) push(n, sink int, amount gpu.Memory) (sent gpu.Memory) {
	if n == sink {
		return amount
	}
	for ; f.tried[n] < len(f.from[n]); f.tried[n]++ {
		i := f.from[n][f.tried[n]]
		e := &f.edges[i]
		if e.left == 0 || f.lengths[n]+f.length(e) != f.lengths[e.to] {
			continue
		}
		more := f.push(e.to, sink, min(amount-sent, e.left))
		e.left -= more
		f.edges[i^1].left += more
		if sent += more; sent == amount {
			return sent
		}
	}
	return sent
}

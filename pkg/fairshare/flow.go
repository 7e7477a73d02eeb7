package fairshare

import (
	"math"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// unlimited is the capacity of an edge without a limit. Some of them add up without an overflow.
const unlimited = gpu.Memory(math.MaxInt64 / 4)

// flow is a network with a flow. Its nodes are numbers from 0 on.
type flow struct {
	// from holds the positions of the edges that leave each node.
	from  [][]int
	edges []edge
	// lengths are those of the paths that the latest search found, unreached for nodes to which nothing more can flow.
	lengths []int
	// tried is how many edges of each node push has tried since then.
	tried []int
	// queue belongs to search.
	queue []int
}

const unreached = math.MaxInt

// edge is a direction of a connection. The opposite one is at the position that differs in the last bit.
type edge struct {
	to int
	// left is how much more can flow.
	left gpu.Memory
}

func newFlow(nodes int) *flow {
	return &flow{from: make([][]int, nodes), lengths: make([]int, nodes), tried: make([]int, nodes)}
}

// connect adds an edge.
func (f *flow) connect(from, to int, capacity gpu.Memory) {
	n := len(f.edges)
	f.edges = append(f.edges, edge{to, capacity}, edge{from, 0})
	f.from[from], f.from[to] = append(f.from[from], n), append(f.from[to], n+1)
}

// maximize increases the flow as far as possible, and returns by how much. What flows out of the source along an edge never
// decreases. Each search serves all shortest paths, as in Dinic's algorithm.
func (f *flow) maximize(source, sink int) (more gpu.Memory) {
	for f.search(source); f.lengths[sink] != unreached; f.search(source) {
		clear(f.tried)
		more += f.push(source, sink, unlimited)
	}
	return more
}

// search finds the shortest paths from the source along which more can flow.
func (f *flow) search(source int) {
	for n := range f.lengths {
		f.lengths[n] = unreached
	}
	f.lengths[source], f.queue = 0, append(f.queue[:0], source)
	for next := 0; next < len(f.queue); next++ {
		n := f.queue[next]
		for _, i := range f.from[n] {
			if e := &f.edges[i]; e.left > 0 && f.lengths[e.to] == unreached {
				f.lengths[e.to], f.queue = f.lengths[n]+1, append(f.queue, e.to)
			}
		}
	}
}

// push sends up to the amount from a node to the sink along shortest paths, and returns how much.
func (f *flow) push(n, sink int, amount gpu.Memory) (sent gpu.Memory) {
	if n == sink {
		return amount
	}
	for ; f.tried[n] < len(f.from[n]); f.tried[n]++ {
		i := f.from[n][f.tried[n]]
		e := &f.edges[i]
		if e.left == 0 || f.lengths[n]+1 != f.lengths[e.to] {
			continue
		}
		more := f.push(e.to, sink, min(amount-sent, e.left))
		e.left -= more
		f.edges[i^1].left += more
		sent += more
		if sent == amount {
			return sent
		}
	}
	return sent
}

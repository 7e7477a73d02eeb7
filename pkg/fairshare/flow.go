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

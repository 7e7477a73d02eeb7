package ledger

import "sync"

// nodeOrder is the order in which kube-scheduler names nodes. It names hundreds or thousands of them for every pod, as samples that continue each
// other or as the same list each time, and in nearly the same order. Comparing a name with a few names that followed the last one before is much
// cheaper than a map look-up, which misses the processor's caches. The zero value is ready for use. mu guards the fields, and the positions of
// nodes.
type nodeOrder struct {
	mu sync.Mutex
	// membership is the value of the ledger's membership for which the order is valid.
	membership uint64
	// nodes are each node once, in the order in which calls named them first.
	nodes []orderedNode
	// text are their names, one after the other, and ends their ends in it: names that lie next to each other in memory are read much faster.
	text []byte
	ends []int
}

// orderedNode is a node with its costRow: for most nodes and pods Rank reads no more, and the rows of nodes that follow one another are next to each
// other in memory.
type orderedNode struct {
	*node
	costs costRow
}

func ordered(n *node) orderedNode {
	if n == nil {
		return orderedNode{}
	}
	return orderedNode{n, n.costs}
}

// each calls visit with the node of each name, nil if there is none. The caller holds the ledger's lock, at least for reading.
func (l *Ledger) each(names []string, visit func(i int, n orderedNode)) {
	o := &l.order
	if !o.mu.TryLock() { // Another call uses the order.
		for i, name := range names {
			visit(i, ordered(l.nodes[name]))
		}
		return
	}
	defer o.mu.Unlock()
	if o.membership != l.membership {
		o.forget()
		o.membership = l.membership
	}
	runs, elsewhere := runs{}, 0
	for i, name := range names {
		if at, found := runs.find(o, name); found {
			visit(i, o.nodes[at])
			continue
		}
		n := l.nodes[name]
		if n != nil {
			if !o.has(n) {
				o.add(n)
			} else {
				elsewhere++
			}
			runs.begin(n.orderPosition + 1)
		}
		visit(i, ordered(n))
	}
	if elsewhere > len(names)/2 { // Another order is in use now.
		o.forget()
	}
}

func (o *nodeOrder) forget() {
	clear(o.nodes) // Nodes that no longer exist don't stay in memory.
	o.nodes, o.text, o.ends = o.nodes[:0], o.text[:0], o.ends[:0]
}

func (o *nodeOrder) has(n *node) bool {
	return n.orderPosition < len(o.nodes) && o.nodes[n.orderPosition].node == n
}

func (o *nodeOrder) add(n *node) {
	n.orderPosition = len(o.nodes)
	o.nodes, o.text = append(o.nodes, ordered(n)), append(o.text, n.name...)
	o.ends = append(o.ends, len(o.text))
}

// name returns the name of the node at the position.
func (o *nodeOrder) name(at int) []byte {
	from := 0
	if at > 0 {
		from = o.ends[at-1]
	}
	return o.text[from:o.ends[at]]
}

// runs are the positions in the order at which two sequences of nodes continue, the most recently used first. kube-scheduler checks
// sequences of nodes in parallel, and its list interleaves them differently each time.
type runs struct{ next, other int }

// runWidth is how many names are compared for each run: those of another run lie between its own.
const runWidth = 3

// find returns the position of the name, if it is where one of the runs continues.
func (r *runs) find(o *nodeOrder, name string) (at int, found bool) {
	for range 2 {
		for at = r.next; at < min(r.next+runWidth, len(o.nodes)); at++ {
			if string(o.name(at)) == name {
				r.next = at + 1
				return at, true
			}
		}
		r.next, r.other = r.other, r.next
	}
	return 0, false
}

// begin adds a run that continues at next. It replaces the one that was used less recently.
func (r *runs) begin(next int) { r.next, r.other = next, r.next }

package ledger

import "sync"

// nameCache caches the nodes of the last list of names. kube-scheduler sends thousands of names for every pod, in nearly the
// same order each time. Comparing a name with a few names of the last list is much cheaper than a map look-up, which misses the
// processor's caches. The zero value is ready for use.
type nameCache struct {
	mu sync.Mutex
	// membership is the value of the ledger's membership for which the cache is valid.
	membership uint64
	names      []string
	nodes      []*node
	// spare is the former nodes slice, for reuse.
	spare []*node
}

// each calls visit with the node of each name, nil if there is none. The caller holds the ledger's lock, at least for
// reading. each may keep names, so the slice must not be changed. It doesn't keep a list with far more names than there are nodes,
// so that a huge request doesn't stay in memory. It doesn't keep a list that is much shorter than the last one either, because prioritize's
// short lists alternate with filter's long ones.
func (l *Ledger) each(names []string, visit func(i int, n *node)) {
	r := &l.nameCache
	if len(names) > 2*len(l.nodes) || !r.mu.TryLock() { // Another call uses the cache.
		l.lookUpEach(names, visit)
		return
	}
	defer r.mu.Unlock()
	if r.membership == l.membership && len(names) < len(r.names)/2 {
		l.lookUpEach(names, visit)
		return
	}
	last, lastNodes := r.names, r.nodes
	if r.membership != l.membership {
		last = nil
	}
	called, runs := r.spare[:0], runs{}
	for i, name := range names {
		var n *node
		if at, found := runs.find(last, name); found {
			n = lastNodes[at]
		} else if n = l.nodes[name]; n != nil {
			runs.begin(int(n.cachePosition) + 1)
		}
		if n != nil && n.cachePosition != int32(i) {
			n.cachePosition = int32(i)
		}
		called = append(called, n)
		visit(i, n)
	}
	r.membership, r.names, r.nodes, r.spare = l.membership, names, called, lastNodes
}

// runs are the positions in the last list at which two sequences of nodes continue, the most recently used first. kube-scheduler checks
// sequences of nodes in parallel, and its list interleaves them differently each time.
type runs struct{ next, other int }

// runWidth is how many names of the last list are compared for each run: those of another run lie between its own.
const runWidth = 3

// find returns the position of the name in the last list, if it is where one of the runs continues.
func (r *runs) find(last []string, name string) (at int, found bool) {
	for range 2 {
		for at = r.next; at < min(r.next+runWidth, len(last)); at++ {
			if last[at] == name {
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

func (l *Ledger) lookUpEach(names []string, visit func(i int, n *node)) {
	for i, name := range names {
		visit(i, l.nodes[name])
	}
}

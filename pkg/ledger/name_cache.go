package ledger

import "sync"

// nameCache caches the nodes of the last list of names. kube-scheduler sends thousands of names for every pod, in nearly the
// same order each time. Comparing a name with the one at the same position in the last list costs a fraction of a map
// look-up, which misses the processor's caches. The zero value is ready for use.
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
// reading. each may keep names, which must not change. It doesn't keep a list with far more names than there are nodes,
// so that a huge request doesn't stay in memory, nor one that is much shorter than the last list, since prioritize's short
// lists come between filter's long ones.
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
	called, next := r.spare[:0], 0
	for i, name := range names {
		var n *node
		if next < len(last) && last[next] == name {
			n = lastNodes[next]
			next++
		} else if n = l.nodes[name]; n != nil {
			next = n.cachePosition + 1
		}
		if n != nil && n.cachePosition != i {
			n.cachePosition = i
		}
		called = append(called, n)
		visit(i, n)
	}
	r.membership, r.names, r.nodes, r.spare = l.membership, names, called, lastNodes
}

func (l *Ledger) lookUpEach(names []string, visit func(i int, n *node)) {
	for i, name := range names {
		visit(i, l.nodes[name])
	}
}

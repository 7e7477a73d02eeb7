package ledger

import "sync"

// roll remembers which nodes the names of the last list are. kube-scheduler names thousands for every pod, in nearly the
// same order each time: to compare a name with the one that stood there last costs a fraction of looking it up, for which
// the processor finds nothing in its caches. The zero value is ready for use.
type roll struct {
	mu sync.Mutex
	// of is the ledger's membership for which the roll is good.
	of    uint64
	names []string
	nodes []*node
	// spare is the roll before, to be written over.
	spare []*node
}

// each calls visit with each name's node, nil for one that isn't known. It needs the ledger's lock, for reading at least,
// and may keep the names, which must not change. Of a list that names far more than there is nothing is kept: whoever sends
// millions of names doesn't have them stay in memory until the next list. Nor of one that is much shorter than the last:
// prioritize's few come between filter's many.
func (l *Ledger) each(names []string, visit func(i int, n *node)) {
	r := &l.roll
	if len(names) > 2*len(l.nodes) || !r.mu.TryLock() { // Where it can't be had, others are looking too.
		l.lookUp(names, visit)
		return
	}
	defer r.mu.Unlock()
	if r.of == l.membership && len(names) < len(r.names)/2 {
		l.lookUp(names, visit)
		return
	}
	last, lastNodes := r.names, r.nodes
	if r.of != l.membership {
		last = nil
	}
	called, next := r.spare[:0], 0
	for i, name := range names {
		var n *node
		if next < len(last) && last[next] == name {
			n = lastNodes[next]
			next++
		} else if n = l.nodes[name]; n != nil {
			next = n.called + 1
		}
		if n != nil && n.called != i {
			n.called = i
		}
		called = append(called, n)
		visit(i, n)
	}
	r.of, r.names, r.nodes, r.spare = l.membership, names, called, lastNodes
}

func (l *Ledger) lookUp(names []string, visit func(i int, n *node)) {
	for i, name := range names {
		visit(i, l.nodes[name])
	}
}

package ledger

// Changes are the nodes that changed after a revision of the ledger.
type Changes struct {
	// Revision is the one to pass to the next call of Since.
	Revision uint64
	// Whole is true if Nodes holds every node: a node that is not in it no longer exists.
	Whole bool
	// Nodes are the nodes that may have changed, by name. Each is consistent in itself.
	Nodes []Node
}

// Since returns what changed after the revision, which an earlier call returned; zero returns everything. It is cheap if
// nothing changed.
func (l *Ledger) Since(revision uint64) Changes {
	out, names := l.changed(revision)
	// A change from here on has a later revision, so the next call returns it again.
	out.Nodes = l.read(names)
	return out
}

// changed returns the changes without Nodes, and the names of these nodes.
func (l *Ledger) changed(revision uint64) (out Changes, names []string) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	out = Changes{Revision: l.revision, Whole: revision == 0 || revision < l.forgotten}
	if revision == l.revision && !out.Whole {
		return out, nil
	}
	for name, n := range l.nodes {
		if out.Whole || n.revision > revision {
			names = append(names, name)
		}
	}
	return out, names
}

// touch records a change of the node. The caller holds the lock.
func (l *Ledger) touch(n *node) {
	l.revision++
	n.revision = l.revision
}

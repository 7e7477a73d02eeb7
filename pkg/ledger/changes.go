package ledger

// Changes is what became of a ledger after a certain revision.
type Changes struct {
	// Revision is to be asked about next.
	Revision uint64
	// Whole says that Nodes is every node there is: of those that aren't in it, nothing is left.
	Whole bool
	// Nodes are the nodes that may have changed, in order of their names, each as it stands at one moment.
	Nodes []Node
}

// Since returns what became of the ledger after the revision, which came with an earlier answer; zero asks for
// everything. It costs next to nothing where nothing changed.
func (l *Ledger) Since(revision uint64) Changes {
	out, names := l.changed(revision)
	// What changes from here on is of a later revision: it is told again, or makes the next answer whole.
	out.Nodes = l.read(names)
	return out
}

// changed returns the answer without its nodes, and their names.
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

// touch notes, under the lock, that the node is about to be another than it was.
func (l *Ledger) touch(n *node) {
	l.revision++
	n.revision = l.revision
}

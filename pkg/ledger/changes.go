package ledger

import "slices"

// Changes are the nodes that changed after a revision of the ledger.
type Changes struct {
	// Revision is the one to pass to the next call of ChangesSince.
	Revision uint64
	// Full is true if Nodes holds every node: a node that is not in it no longer exists.
	Full bool
	// Nodes are the nodes that may have changed, by name. Each is consistent in itself.
	Nodes []Node
}

// ChangesSince returns what changed after the revision, which an earlier call returned; zero returns everything. It is
// cheap if nothing changed.
func (l *Ledger) ChangesSince(revision uint64) Changes {
	out, names := l.changedSince(revision)
	slices.Sort(names)
	// A change from here on has a later revision, so the next call returns it again.
	out.Nodes = l.read(names)
	return out
}

// changedSince returns the changes without Nodes, and the names of these nodes.
func (l *Ledger) changedSince(revision uint64) (out Changes, names []string) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	out = Changes{Revision: l.revision, Full: revision == 0 || revision < l.forgotten}
	if revision == l.revision && !out.Full {
		return out, nil
	}
	for name, n := range l.nodes {
		if out.Full || n.revision > revision {
			names = append(names, name)
		}
	}
	return out, names
}

// markChanged records a change of the node. The caller holds the lock.
func (l *Ledger) markChanged(n *node) {
	l.revision++
	n.revision = l.revision
	n.costs.Store(nil)
}

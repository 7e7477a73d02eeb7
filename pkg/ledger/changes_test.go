package ledger_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/gpushare/gpushare/pkg/ledger"
)

// follower builds its copy of the ledger only from changes.
type follower struct {
	revision uint64
	nodes    map[string]ledger.Node
}

// follow applies the changes. It returns all nodes, sorted by name, and the number of nodes in the changes.
func (f *follower) follow(l *ledger.Ledger) (nodes []ledger.Node, changed int) {
	changes := l.ChangesSince(f.revision)
	if changes.Full {
		f.nodes = map[string]ledger.Node{}
	}
	for _, n := range changes.Nodes {
		f.nodes[n.Name] = n
	}
	f.revision = changes.Revision
	for _, name := range slices.Sorted(maps.Keys(f.nodes)) {
		nodes = append(nodes, f.nodes[name])
	}
	return nodes, len(changes.Nodes)
}

// TestChangesMinimal checks how many nodes the changes have after each step. TestSimulation checks their content.
func TestChangesMinimal(t *testing.T) {
	f, reader, p := newFixture(t, spec(16, 16), spec(16, 16), spec(16), spec(16), spec(16)), &follower{}, pod("p", 4)
	for _, step := range []struct {
		what string
		do   func()
		want int
	}{
		{"first call", func() {}, 5},
		{"no change", func() {}, 0},
		{"a reservation", func() { f.reserve("n1", p) }, 1},
		{"a confirmed bind", func() { f.bind("n1", 0, p) }, 1},
		{"the same bind, reported again", func() { f.bind("n1", 0, p) }, 0},
		{"a pod on another node", func() { f.bind("n2", 1, p) }, 2},
		{"a removed pod", func() { f.Remove(p.UID) }, 1},
		{"deletion of an unknown node", func() { f.DeleteNode("never there") }, 0},
		{"deletion of a node", func() { f.DeleteNode("n3") }, 4},
		{"no change after that", func() {}, 0},
	} {
		step.do()
		_, got := reader.follow(f.Ledger)
		expect(t, step.what, step.want, got)
	}
}

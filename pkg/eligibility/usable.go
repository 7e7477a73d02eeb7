package eligibility

import (
	"cmp"
	"slices"
	"sync"
	"unique"
)

const (
	// maxLists limits the lists of nodes that are kept.
	maxLists = 64
	// maxChanges is how many changes of nodes are remembered. A set that is older than all of them is made again.
	maxChanges = 1024
)

// usableNodes keeps which nodes pods with equal constraints can use: a set of bits for each of the constraints that a pod has. A node keeps its
// position in the sets as long as it exists, so that a change of one node changes one bit. The sets take a bit for each node and for each
// different constraints: two megabytes for 3,000 constraints and 5,000 nodes. mu guards the fields. It isn't held while constraints are matched
// with nodes, because that can take long.
type usableNodes struct {
	mu    sync.Mutex
	nodes map[string]*placedNode
	// at are the nodes by position; nil at vacant ones.
	at     []*placedNode
	vacant []int
	// layout is nil if it must be made again.
	layout *layout
	// revision counts the changes of nodes, and changes are the positions of the last ones. It is at least 1 if there are nodes.
	revision int
	changes  []int
	sets     map[unique.Handle[string]]*nodeSet
	// lists are the names of the nodes by the bits of a set. After the positions of nodes have changed, the same bits stand for other nodes.
	lists map[unique.Handle[string]][]string
}

// placedNode is a node with its position in the sets. It is never changed.
type placedNode struct {
	*Node
	position int
}

// layout are the nodes, sorted by name. It is never changed.
type layout struct {
	nodes []*placedNode
	index *Index
}

// nodeSet are the nodes that pods with some constraints can use.
type nodeSet struct {
	// pods is the number of pods with these constraints.
	pods int
	// bits has a bit for each position, the lowest of each byte first, without zero bytes at the end. Equal sets share their bits.
	bits unique.Handle[string]
	// revision is that of the nodes for which bits is right; 0 if it isn't known yet.
	revision int
}

func newUsableNodes() usableNodes {
	return usableNodes{nodes: map[string]*placedNode{}, sets: map[unique.Handle[string]]*nodeSet{}, lists: map[unique.Handle[string]][]string{}}
}

// set adds or changes a node.
func (u *usableNodes) set(node *Node) {
	u.mu.Lock()
	defer u.mu.Unlock()
	name := node.Object.Name
	n := &placedNode{Node: node}
	switch former := u.nodes[name]; {
	case former != nil:
		n.position = former.position
	case len(u.vacant) > 0:
		n.position, u.vacant = u.vacant[len(u.vacant)-1], u.vacant[:len(u.vacant)-1]
		clear(u.lists)
	default:
		n.position, u.at = len(u.at), append(u.at, nil)
		clear(u.lists)
	}
	u.nodes[name], u.at[n.position] = n, n
	u.changed(n.position)
}

// remove removes a node.
func (u *usableNodes) remove(name string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if n := u.nodes[name]; n != nil {
		delete(u.nodes, name)
		u.at[n.position], u.vacant = nil, append(u.vacant, n.position)
		clear(u.lists)
		u.changed(n.position)
	}
}

func (u *usableNodes) changed(position int) {
	u.revision++
	u.layout = nil
	if len(u.changes) == 2*maxChanges {
		u.changes = append(u.changes[:0], u.changes[maxChanges:]...)
	}
	u.changes = append(u.changes, position)
}

// retain records a pod with the constraints, and release the end of one. Their set is kept as long as there is such a pod.
func (u *usableNodes) retain(constraints unique.Handle[string]) {
	if constraints == (unique.Handle[string]{}) {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	s := u.sets[constraints]
	if s == nil {
		s = &nodeSet{}
		u.sets[constraints] = s
	}
	s.pods++
}

func (u *usableNodes) release(constraints unique.Handle[string]) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if s := u.sets[constraints]; s != nil {
		s.pods--
		if s.pods == 0 {
			delete(u.sets, constraints)
		}
	}
}

// UsableNodes returns the names of the nodes that pods with the constraints can use, whatever they have free, in order; not nil. The caller must not
// change them. Equal sets of nodes mostly share one slice.
func (c *Cluster) UsableNodes(constraints unique.Handle[string]) []string {
	u := &c.usable
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.list(u.current(constraints))
}

// UsableAmong returns those of the nodes that pods with the constraints can use.
func (c *Cluster) UsableAmong(constraints unique.Handle[string], nodes []string) (among []string) {
	u := &c.usable
	u.mu.Lock()
	defer u.mu.Unlock()
	bits := u.current(constraints)
	for _, name := range nodes {
		if n := u.nodes[name]; n != nil && n.in(bits) {
			among = append(among, name)
		}
	}
	return among
}

// in reports whether the node is in a set.
func (n *placedNode) in(bits unique.Handle[string]) bool {
	if bits == (unique.Handle[string]{}) {
		return false
	}
	set, i := bits.Value(), n.position/8
	return i < len(set) && set[i]&(1<<(n.position%8)) != 0
}

// current returns the bits of the set of the nodes as they are now. It releases the lock while it matches nodes.
func (u *usableNodes) current(constraints unique.Handle[string]) unique.Handle[string] {
	s := u.sets[constraints]
	if s == nil {
		s = &nodeSet{} // The last such pod has gone.
	}
	for s.revision < u.revision {
		u.match(s, constraints)
	}
	return s.bits
}

// match matches the constraints with the nodes that have changed since the set's revision, or with all nodes. It releases the lock meanwhile.
func (u *usableNodes) match(s *nodeSet, constraints unique.Handle[string]) {
	revision, bits := u.revision, make([]byte, (len(u.at)+7)/8)
	all := s.revision == 0 || revision-s.revision > len(u.changes) // Not all changes since the set's revision are known.
	var nodes []*placedNode                                        // Those to match.
	if !all {
		copy(bits, s.bits.Value())
		for _, position := range u.changes[len(u.changes)-(revision-s.revision):] {
			bits[position/8] &^= 1 << (position % 8)
			if n := u.at[position]; n != nil {
				nodes = append(nodes, n)
			}
		}
	}
	layout := u.ordered()
	u.mu.Unlock()
	c := Parse(constraints)
	if all && c != nil {
		for _, i := range layout.index.Candidates(c) {
			nodes = append(nodes, layout.nodes[i])
		}
	}
	for _, n := range nodes {
		if n.Admits(c) {
			bits[n.position/8] |= 1 << (n.position % 8)
		}
	}
	for len(bits) > 0 && bits[len(bits)-1] == 0 {
		bits = bits[:len(bits)-1]
	}
	u.mu.Lock()
	if s.revision < revision { // Otherwise another call was faster.
		s.bits, s.revision = unique.Make(string(bits)), revision
	}
}

// ordered returns the layout.
func (u *usableNodes) ordered() *layout {
	if u.layout == nil {
		l := &layout{}
		nodes := make([]*Node, 0, len(u.nodes))
		for _, n := range u.nodes {
			l.nodes = append(l.nodes, n)
		}
		slices.SortFunc(l.nodes, func(a, b *placedNode) int { return cmp.Compare(a.Object.Name, b.Object.Name) })
		for _, n := range l.nodes {
			nodes = append(nodes, n.Node)
		}
		l.index, u.layout = NewIndex(nodes), l
	}
	return u.layout
}

// list returns the names of the nodes in a set; not nil.
func (u *usableNodes) list(bits unique.Handle[string]) []string {
	names, known := u.lists[bits]
	if known {
		return names
	}
	names = []string{}
	for _, n := range u.ordered().nodes {
		if n.in(bits) {
			names = append(names, n.Object.Name)
		}
	}
	if len(u.lists) >= maxLists {
		clear(u.lists)
	}
	u.lists[bits] = names
	return names
}

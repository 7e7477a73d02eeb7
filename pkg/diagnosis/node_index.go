package diagnosis

import (
	"cmp"
	"maps"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// nodeIndex finds the nodes that a pod's constraints name without reading all of them: each pod of a DaemonSet names its own
// node.
type nodeIndex struct {
	// nodes are sorted by name; figures are theirs, in the same order.
	nodes   []Node
	figures []figures
	// labels are the keys of the nodes' labels; nil until a pod names one. byLabel holds the positions of the nodes by value of a label, for each
	// of these labels that a pod has named.
	labels  map[string]bool
	byLabel map[string]map[string][]int
}

func newNodeIndex(nodes []Node) nodeIndex {
	x := nodeIndex{nodes: nodes, figures: make([]figures, len(nodes)), byLabel: map[string]map[string][]int{}}
	for i := range nodes {
		x.figures[i] = newFigures(&nodes[i])
	}
	return x
}

// figures are what the search for room reads of a node for each request. They are computed once.
type figures struct {
	totals placement.Totals
	// piece, free and largest are MostFree, FreeHealthy and Largest of the totals in bytes, to compare nodes with different units.
	piece, free, largest gpu.Memory
	// spare is what kube-scheduler counts as free on the node; the greatest amount if the node doesn't report its allocatable memory.
	spare gpu.Memory
	// after are the cards once the terminating pods have ended; nil if no pod is terminating.
	after *cardsAfter
	// plain is true if nothing but the totals decides what the node has for a pod that asks for memory of one card only.
	plain bool
}

type cardsAfter struct {
	cards  []placement.Card
	totals placement.Totals
}

func newFigures(n *Node) figures {
	totals := placement.Sum(n.Cards)
	f := figures{
		totals: totals, piece: n.bytes(totals.MostFree), free: n.bytes(totals.FreeHealthy), largest: n.bytes(totals.Largest), spare: math.MaxInt64,
	}
	if allocatable, known := n.allocatable(); known {
		f.spare = allocatable.Sub(n.Requested)
	}
	if len(n.Terminating) > 0 {
		cards := n.Cards
		for i := range n.Terminating {
			cards = withUsed(cards, n.Terminating[i].Placement, (*placement.Card).Subtract)
		}
		f.after = &cardsAfter{cards, placement.Sum(cards)}
	}
	f.plain = f.after == nil && len(n.Nominees) == 0 && f.spare >= totals.FreeHealthy && !totals.Limited
	return f
}

// same reports whether two nodes have the same for each pod that asks for memory of one card only.
func (f *figures) same(o *figures) bool {
	return f.plain && o.plain && f.totals == o.totals && f.compare(o) == 0 && f.largest == o.largest
}

// compare compares what two nodes have free: first the largest piece, then the sum.
func (f *figures) compare(o *figures) int {
	return cmp.Or(cmp.Compare(f.piece, o.piece), cmp.Compare(f.free, o.free))
}

// position returns the position of the node of that name.
func (x *nodeIndex) position(name string) (int, bool) {
	return slices.BinarySearchFunc(x.nodes, name, func(node Node, name string) int { return cmp.Compare(node.Object.Name, name) })
}

// named returns the node of that name.
func (x *nodeIndex) named(name string) (*Node, bool) {
	i, found := x.position(name)
	if !found {
		return nil, false
	}
	return &x.nodes[i], true
}

// labelled returns the positions of the nodes on which the label has the value.
func (x *nodeIndex) labelled(key, value string) []int {
	if x.labels == nil {
		x.labels = map[string]bool{}
		for i := range x.nodes {
			for key := range x.nodes[i].Object.Labels {
				x.labels[key] = true
			}
		}
	}
	values := x.byLabel[key]
	if values == nil && x.labels[key] { // A pod can name hundreds of labels that no node has.
		values = map[string][]int{}
		for i := range x.nodes {
			if value, ok := x.nodes[i].Object.Labels[key]; ok {
				values[value] = append(values[value], i)
			}
		}
		x.byLabel[key] = values
	}
	return values[value]
}

// candidates returns the positions of all nodes that the constraints can admit, and perhaps of others, in order. all is true
// if the constraints name no label or name.
func (x *nodeIndex) candidates(c *constraints) (positions []int, all bool) {
	if len(c.pinnedTo()) > 0 {
		positions, _ = x.inTerms(c.requiredTerms())
		return positions, false
	}
	all = true
	narrow := func(to []int) {
		if all || len(to) < len(positions) {
			positions, all = to, false
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.spec.NodeSelector)) { // Sorted, so that equal pods get equal messages.
		narrow(x.labelled(key, c.spec.NodeSelector[key]))
	}
	if terms := c.requiredTerms(); len(terms) > 0 {
		if union, named := x.inTerms(terms); named {
			narrow(union)
		}
	}
	return positions, all
}

// inTerms returns the union of the nodes that the terms name; false if one of the terms names none.
func (x *nodeIndex) inTerms(terms []corev1.NodeSelectorTerm) ([]int, bool) {
	var union []int
	compact := func() {
		slices.Sort(union)
		union = slices.Compact(union)
	}
	for i := range terms {
		positions, named := x.inTerm(&terms[i])
		if !named {
			return nil, false
		}
		if union = append(union, positions...); len(union) > 2*len(x.nodes) { // Each of many terms can name all nodes.
			compact()
		}
	}
	compact()
	return union, true
}

func (x *nodeIndex) inTerm(term *corev1.NodeSelectorTerm) (positions []int, named bool) {
	if names := pinnedNames(term); names != nil {
		for _, name := range names {
			if i, found := x.position(name); found {
				positions = append(positions, i)
			}
		}
		return positions, true
	}
	for _, r := range term.MatchExpressions {
		if r.Operator == corev1.NodeSelectorOpIn {
			for _, value := range r.Values {
				positions = append(positions, x.labelled(r.Key, value)...)
			}
			return positions, true
		}
	}
	return nil, false
}

// pinnedNames returns the names of the only nodes that the term admits, as the controller of DaemonSets sets them; nil if it
// names none.
func pinnedNames(term *corev1.NodeSelectorTerm) []string {
	for _, r := range term.MatchFields {
		if r.Key == "metadata.name" && r.Operator == corev1.NodeSelectorOpIn {
			return r.Values
		}
	}
	return nil
}

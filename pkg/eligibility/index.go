package eligibility

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
)

// Index finds the nodes that a pod's constraints name without reading all of them: each pod of a DaemonSet names its own node. It is
// safe for concurrent use.
type Index struct {
	// nodes are sorted by name.
	nodes []*Node
	// mu guards the fields below it.
	mu sync.Mutex
	// labels are the keys of the nodes' labels; nil until a pod names one. byLabel holds the positions of the nodes by value of a label, for each
	// of these labels that a pod has named.
	labels  map[string]bool
	byLabel map[string]map[string][]int
}

// NewIndex returns an Index of the nodes, which must be sorted by name.
func NewIndex(nodes []*Node) *Index {
	return &Index{nodes: nodes, byLabel: map[string]map[string][]int{}}
}

// Position returns the position of the node of that name.
func (x *Index) Position(name string) (int, bool) {
	return slices.BinarySearchFunc(x.nodes, name, func(node *Node, name string) int { return cmp.Compare(node.Object.Name, name) })
}

// labelled returns the positions of the nodes on which the label has the value.
func (x *Index) labelled(key, value string) []int {
	x.mu.Lock()
	defer x.mu.Unlock()
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

// Candidates returns the positions of all nodes that the constraints can admit, and perhaps of others, in order.
func (x *Index) Candidates(c *Constraints) (positions []int) {
	if len(c.PinnedTo()) > 0 {
		positions, _ = x.inTerms(c.requiredTerms())
		return positions
	}
	all := true
	narrow := func(to []int) {
		if all || len(to) < len(positions) {
			positions, all = to, false
		}
	}
	for _, key := range slices.Sorted(maps.Keys(c.NodeSelector)) { // Sorted, so that equal pods get equal messages.
		narrow(x.labelled(key, c.NodeSelector[key]))
	}
	if terms := c.requiredTerms(); len(terms) > 0 {
		if union, named := x.inTerms(terms); named {
			narrow(union)
		}
	}
	if all { // The constraints name no label and no node.
		for i := range x.nodes {
			positions = append(positions, i)
		}
	}
	return positions
}

// inTerms returns the union of the nodes that the terms name; false if one of the terms names none.
func (x *Index) inTerms(terms []corev1.NodeSelectorTerm) ([]int, bool) {
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
		union = append(union, positions...)
		if len(union) > 2*len(x.nodes) { // Each of many terms can name all nodes.
			compact()
		}
	}
	compact()
	return union, true
}

func (x *Index) inTerm(term *corev1.NodeSelectorTerm) (positions []int, named bool) {
	if names := pinnedNames(term); names != nil {
		for _, name := range names {
			if i, found := x.Position(name); found {
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

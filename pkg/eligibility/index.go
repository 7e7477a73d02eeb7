package eligibility

import (
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Index finds the nodes that a pod's constraints name without reading all of them: each pod of a DaemonSet names its own node. It is
// safe for concurrent use.
type Index struct {
	nodes []*Node
	// byName returns the positions of the nodes by their names and hostnames.
	byName func() map[string][]int
}

// NewIndex returns an Index of the nodes.
func NewIndex(nodes []*Node) *Index {
	return &Index{nodes, sync.OnceValue(func() map[string][]int {
		byName := make(map[string][]int, len(nodes))
		for i, node := range nodes {
			name, host := node.Object.Name, node.Object.Labels[corev1.LabelHostname]
			byName[name] = append(byName[name], i)
			if host != "" && host != name {
				byName[host] = append(byName[host], i)
			}
		}
		return byName
	})}
}

// Candidates returns the positions of all nodes that the constraints can admit, and perhaps of others, in order.
func (x *Index) Candidates(c *Constraints) (positions []int) {
	names, named := c.names()
	if !named {
		for i := range x.nodes {
			positions = append(positions, i)
		}
		return positions
	}
	for _, name := range names {
		positions = append(positions, x.byName()[name]...)
	}
	slices.Sort(positions)
	return slices.Compact(positions)
}

// names returns the names and hostnames of the only nodes that the constraints can admit, and whether they name nodes.
func (c *Constraints) names() (names []string, named bool) {
	if host, selected := c.selector[corev1.LabelHostname]; selected {
		return []string{host}, true
	}
	for i := range c.terms {
		in := namedBy(&c.terms[i])
		if in == nil {
			return nil, false
		}
		names = append(names, in...)
	}
	return names, len(c.terms) > 0
}

// namedBy returns the names or hostnames of the only nodes that the term admits, as the controller of DaemonSets sets them; nil if it names none.
func namedBy(term *corev1.NodeSelectorTerm) []string {
	for _, r := range slices.Concat(term.MatchFields, term.MatchExpressions) {
		if (r.Key == metav1.ObjectNameField || r.Key == corev1.LabelHostname) && r.Operator == corev1.NodeSelectorOpIn {
			return r.Values
		}
	}
	return nil
}

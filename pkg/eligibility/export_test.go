package eligibility

import "unique"

// Names returns the names of the nodes that pods with the constraints can use, in order; not nil.
func (x *Index) Names(constraints unique.Handle[string]) []string {
	names, c := []string{}, Parse(constraints)
	if c == nil {
		return names
	}
	for _, i := range x.Candidates(c) {
		if node := x.nodes[i]; node.Admits(c) {
			names = append(names, node.Object.Name)
		}
	}
	return names
}

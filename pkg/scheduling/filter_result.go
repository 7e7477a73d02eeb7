package scheduling

import (
	"iter"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// FilterResult is the answer of Filter.
type FilterResult struct {
	// Nodes are the candidate nodes of the call.
	Nodes []string
	// Passed are the nodes that pass, by their position in Nodes. If they are only the best few, the most suitable node is
	// the first.
	Passed []placement.Candidate
	// Reasons are the results of all Nodes, in their order; nil if Passed are only the best few, and for members of gangs.
	Reasons []reasons.Reason
	// ReservedFor names the item for which something is reserved, if a node has the reason reasons.Reserved or reasons.ResourcesReserved.
	ReservedFor string
	// Message is why no node passes, for a member of a gang, a pod with an invalid request, or a pod that waits for its turn. It is empty
	// for other pods. Preemption can't help a pod with a Message.
	Message string
	// Demand is what the pod asks for. The texts of reasons depend on it.
	Demand gpu.Demand
}

// Names returns the names of the nodes that pass.
func (r FilterResult) Names() []string { return names(r.Nodes, r.Passed) }

func names(nodes []string, candidates []placement.Candidate) []string {
	out := make([]string, len(candidates))
	for i, candidate := range candidates {
		out[i] = nodes[candidate.Node]
	}
	return out
}

// full returns the names of the nodes on which too few cards have room now.
func (r FilterResult) full() iter.Seq[string] {
	return func(yield func(string) bool) {
		for i, reason := range r.Reasons {
			if reason.Resolvable() && !yield(r.Nodes[i]) {
				return
			}
		}
	}
}

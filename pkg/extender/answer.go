package extender

import (
	"encoding/json"
	"iter"
	"slices"

	corev1 "k8s.io/api/core/v1"
	extenderv1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/gpushare/gpushare/pkg/placement"
)

// filterAnswer is filter's result for the nodes of one call.
type filterAnswer struct {
	names []string
	// fit are the nodes that pass. If filter limits them to the best few, the most suitable node is the first.
	fit []placement.Candidate
	// reasons are the results of the nodes, in the order of names; nil if the answer contains only the nodes that pass.
	reasons []placement.Reason
}

// full returns the names of the nodes on which no card has room now.
func (a filterAnswer) full() iter.Seq[string] {
	return func(yield func(string) bool) {
		for i, reason := range a.reasons {
			if reason.Resolvable() && !yield(a.names[i]) {
				return
			}
		}
	}
}

func everyNode(names []string) []placement.Candidate {
	fit := make([]placement.Candidate, len(names))
	for i := range fit {
		fit[i].Node = i
	}
	return fit
}

// passed returns the names of the nodes that pass.
func (a filterAnswer) passed() []string {
	names := make([]string, len(a.fit))
	for i, candidate := range a.fit {
		names[i] = a.names[candidate.Node]
	}
	return names
}

// answer returns the answer in the form of the request: node names or whole nodes.
func (a *nodesArgs) answer(answer filterAnswer) any {
	if a.NodeNames != nil || a.Nodes == nil {
		return answer
	}
	result := &extenderv1.ExtenderFilterResult{Nodes: &corev1.NodeList{Items: make([]corev1.Node, len(answer.fit))}}
	for i, candidate := range answer.fit {
		result.Nodes.Items[i] = a.Nodes.Items[candidate.Node]
	}
	if answer.reasons != nil {
		result.FailedNodes, result.FailedAndUnresolvableNodes = extenderv1.FailedNodesMap{}, extenderv1.FailedNodesMap{}
	}
	for i, reason := range answer.reasons {
		switch {
		case reason == placement.Fits:
		case reason.Unresolvable():
			result.FailedAndUnresolvableNodes[answer.names[i]] = reason.String()
		default:
			result.FailedNodes[answer.names[i]] = reason.String()
		}
	}
	return result
}

// appendJSON appends the JSON that encoding/json would write for an ExtenderFilterResult, except for the order of the failed
// nodes. It builds no map, so thousands of failed nodes cost next to nothing.
func (a filterAnswer) appendJSON(to []byte) []byte {
	to = slices.Grow(to, a.size())
	to = append(to, `{"NodeNames":[`...)
	for i, candidate := range a.fit {
		if i > 0 {
			to = append(to, ',')
		}
		to = appendString(to, a.names[candidate.Node])
	}
	to = append(to, ']')
	if a.reasons != nil {
		to = append(to, `,"FailedNodes":`...)
		to = a.appendFailed(to, func(r placement.Reason) bool { return r != placement.Fits && !r.Unresolvable() })
		to = append(to, `,"FailedAndUnresolvableNodes":`...)
		to = a.appendFailed(to, placement.Reason.Unresolvable)
	}
	return append(to, '}')
}

// size returns the approximate length of the JSON answer in bytes, so that the buffer is not copied while it grows.
func (a filterAnswer) size() int {
	const punctuation = len(`"":"",`)
	size := 128
	for _, candidate := range a.fit {
		size += len(a.names[candidate.Node]) + punctuation
	}
	for i, reason := range a.reasons {
		if reason != placement.Fits {
			size += len(a.names[i]) + len(reason.String()) + punctuation
		}
	}
	return size
}

// appendFailed appends an object that maps each node whose reason satisfies such to the text of the reason.
func (a filterAnswer) appendFailed(to []byte, such func(placement.Reason) bool) []byte {
	to = append(to, '{')
	first := true
	for i, reason := range a.reasons {
		if !such(reason) {
			continue
		}
		if !first {
			to = append(to, ',')
		}
		first = false
		to = appendString(to, a.names[i])
		to = append(to, ':')
		to = appendString(to, reason.String())
	}
	return append(to, '}')
}

// appendString appends s as a JSON string.
func appendString(to []byte, s string) []byte {
	if !isPlain(s) {
		quoted, _ := json.Marshal(s) // Marshal of a string can't fail.
		return append(to, quoted...)
	}
	to = append(to, '"')
	to = append(to, s...)
	return append(to, '"')
}

// isPlain reports whether s needs no escaping in JSON: it is printable ASCII without quotes and backslashes.
func isPlain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

package extender

import (
	"encoding/json"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/scheduling"
)

// filterAnswer is filter's answer.
type filterAnswer struct {
	scheduling.FilterResult
	// whole are the candidate nodes of a request with whole nodes, which is answered in the same form; nil for one with names.
	whole *corev1.NodeList
}

// texts returns the text of each reason.
func (a filterAnswer) texts() (texts reasons.Texts) {
	for _, reason := range reasons.OfNodes() {
		texts[reason] = reason.TextFor(a.Demand, a.ReservedFor)
	}
	return texts
}

// appendJSON appends the JSON that encoding/json would write for an ExtenderFilterResult, except for null fields and the order
// of the failed nodes. It builds no map, so thousands of failed nodes cost next to nothing.
//
// A member of a gang gets the reason for one node only: kube-scheduler groups reasons by their text, and assumes that
// preemption can't help on a node without a reason (k8s.io/kubernetes pkg/scheduler/framework, NodeToStatus).
func (a filterAnswer) appendJSON(to []byte) []byte {
	if a.whole != nil {
		to = append(append(to, `{"Nodes":`...), a.passedNodes()...)
	} else {
		to = append(to, `{"NodeNames":[`...)
		for i, candidate := range a.Passed {
			if i > 0 {
				to = append(to, ',')
			}
			to = appendString(to, a.Nodes[candidate.Node])
		}
		to = append(to, ']')
	}
	switch {
	case a.Message != "" && len(a.Passed) == 0 && len(a.Nodes) > 0:
		to = append(to, `,"FailedAndUnresolvableNodes":{`...)
		to = appendString(to, a.Nodes[0])
		to = append(to, ':')
		to = appendString(to, a.Message)
		to = append(to, '}')
	case a.Reasons != nil:
		texts := a.texts()
		to = append(to, `,"FailedNodes":`...)
		to = a.appendFailed(to, &texts, reasons.Reason.Resolvable)
		to = append(to, `,"FailedAndUnresolvableNodes":`...)
		to = a.appendFailed(to, &texts, reasons.Reason.Unresolvable)
	}
	return append(to, '}')
}

// passedNodes returns the list of the passed nodes in JSON.
func (a filterAnswer) passedNodes() []byte {
	list := corev1.NodeList{Items: make([]corev1.Node, len(a.Passed))}
	for i, candidate := range a.Passed {
		list.Items[i] = a.whole.Items[candidate.Node]
	}
	text, _ := json.Marshal(list) // Marshal of what was decoded from JSON can't fail.
	return text
}

// appendFailed appends an object that maps each node whose reason satisfies such to the text of the reason.
func (a filterAnswer) appendFailed(to []byte, texts *reasons.Texts, such func(reasons.Reason) bool) []byte {
	to = append(to, '{')
	first := true
	for i, reason := range a.Reasons {
		if !such(reason) {
			continue
		}
		if !first {
			to = append(to, ',')
		}
		first = false
		to = appendString(to, a.Nodes[i])
		to = append(to, ':')
		to = appendString(to, texts[reason])
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

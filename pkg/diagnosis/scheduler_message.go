package diagnosis

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// rejection is kube-scheduler's.
type rejection struct {
	reasons.Rejection
	// others are the reasons of nodes that were rejected neither for GPU memory or the pod's group, nor for what a Diagnoser checks
	// itself; empty if there are none.
	others string
}

// rejectionIn returns the rejection in kube-scheduler's message; false if the message is none.
func rejectionIn(message string) (rejection, bool) {
	parsed, ok := reasons.ParseRejection(message)
	if !ok {
		return rejection{}, false
	}
	unexplained := parsed.Nodes
	var others []string
	short := map[string]int{}
	for _, part := range parsed.Parts {
		// No node has two of these reasons, except that one can lack both memory and cores: the extender isn't called for it.
		switch {
		case part.Text == reasons.InsufficientMemory, part.Text == reasons.InsufficientCores:
			short[part.Text] = part.Nodes
		case part.Reason != reasons.OtherConstraint && part.Reason != reasons.WaitsForTurn, checkedHere(part.Text):
			unexplained -= part.Nodes
		default:
			others = append(others, fmt.Sprintf("%d %s", part.Nodes, part.Text))
		}
	}
	// As many nodes as possible lack both, so that no node's other reason is left out.
	unexplained -= max(short[reasons.InsufficientMemory], short[reasons.InsufficientCores])
	switch {
	case len(parsed.Parts) == 0:
		return rejection{parsed, parsed.Text}, true
	case unexplained <= 0: // A node that lacks GPU memory can have other reasons too.
		return rejection{Rejection: parsed}, true
	}
	return rejection{parsed, strings.Join(others, ", ")}, true
}

// checkedHere reports whether the reason is one that Node.rejection checks (the constants of the plugins TaintToleration,
// NodeAffinity and NodeUnschedulable, and schedule_one.go, findNodesThatFitPod).
func checkedHere(reason string) bool {
	for _, prefix := range []string{
		"node(s) had untolerated taint", "node(s) had taints that the pod didn't tolerate", "node(s) didn't match Pod's node affinity/selector",
		"node(s) were unschedulable", "node(s) didn't satisfy plugin(s) [NodeAffinity]",
	} {
		if strings.HasPrefix(reason, prefix) {
			return true
		}
	}
	return false
}

// Excerpt returns a text of kube-scheduler in one line of at most 300 characters.
func Excerpt(text string) string {
	const limit = 300
	text = strings.Join(strings.Fields(text), " ")
	if utf8.RuneCountInString(text) <= limit {
		return text
	}
	return strings.TrimSpace(string([]rune(text)[:limit-1])) + "…"
}

package diagnosis

import (
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// What kube-scheduler writes into a pod's condition PodScheduled (k8s.io/kubernetes 1.37, pkg/scheduler):
//
//   - Reason Unschedulable: the text of a FitError (framework/types.go, FitError.Error): "0/5 nodes are available: ", then either
//     the text of a PreFilter plugin or the nodes by reason ("2 Insufficient cpu, 3 no GPU card has enough free memory"), a full
//     stop, and what preemption found ("preemption: 0/5 nodes are available: …"). A node has one reason, of the first plugin
//     that rejects it, except that the plugin NodeResourcesFit lists each resource that is short.
//   - Reason SchedulerError: any other error, as it is (schedule_one.go, handleSchedulingFailure). A call that the extender
//     doesn't answer has the text of Go's http.Client (`Post "https://…/gpushare-scheduler/filter": dial tcp …: connect:
//     connection refused`); one with another status than 200 "failed filter with extender at URL …, code 503"; and an error that
//     the extender returns, such as a rejected bind, has the extender's text (extender.go, send, Filter and Bind). kube-scheduler
//     tries such a pod again after its back-off, so the message is never older than some seconds.
//   - Reason SchedulingGated: written by the API server when the pod is created.

// fitError matches the text of a FitError. The part before the full stop has no full stop that a space follows.
var fitError = regexp.MustCompile(`(?s)^0/(\d+) nodes are available: (.*?)\.(?: .*)?$`)

// nodesBefore matches the number of nodes before each reason of a FitError.
var nodesBefore = regexp.MustCompile(`(?:^|, )(\d+) `)

// rejection is the text of a FitError.
type rejection struct {
	// text are the reasons, without the number of all nodes and what preemption found.
	text string
	// others are the reasons of nodes that were rejected neither for GPU memory or the pod's group, nor for what a Diagnoser checks
	// itself; empty if there are none.
	others string
}

// rejectionIn returns the rejection in kube-scheduler's message; false if the message is none.
func rejectionIn(message string) (rejection, bool) {
	match := fitError.FindStringSubmatch(message)
	if match == nil {
		return rejection{}, false
	}
	unexplained, _ := strconv.Atoi(match[1])
	text := match[2]
	var others []string
	short := map[string]int{}
	counts := nodesBefore.FindAllStringSubmatchIndex(text, -1)
	for i, at := range counts {
		end := len(text)
		if i+1 < len(counts) {
			end = counts[i+1][0]
		}
		// No node has two of these reasons, except that one can lack both memory and cores: the extender isn't called for it.
		nodes, _ := strconv.Atoi(text[at[2]:at[3]])
		switch reason := text[at[1]:end]; {
		case reason == InsufficientMemory, reason == InsufficientCores:
			short[reason] = nodes
		case aboutMemory(reason), checkedHere(reason):
			unexplained -= nodes
		default:
			others = append(others, text[at[2]:end])
		}
	}
	// As many nodes as possible lack both, so that no node's other reason is left out.
	unexplained -= max(short[InsufficientMemory], short[InsufficientCores])
	switch {
	case len(counts) == 0:
		return rejection{text, text}, true
	case unexplained <= 0 || len(others) == 0: // A node that lacks GPU memory can have other reasons too.
		return rejection{text: text}, true
	}
	return rejection{text, strings.Join(others, ", ")}, true
}

// InsufficientMemory and InsufficientCores are kube-scheduler's reasons for nodes that lack one of our resources in sum
// (k8s.io/kubernetes pkg/scheduler/framework/plugins/noderesources/fit.go, fitsRequest).
const (
	InsufficientMemory = "Insufficient " + string(protocol.ResourceMemory)
	InsufficientCores  = "Insufficient " + string(protocol.ResourceCores)
)

// aboutMemory reports whether the reason is one of the extender's, or kube-scheduler's that a node lacks GPU memory or cores.
func aboutMemory(reason string) bool {
	return reason == InsufficientMemory || reason == InsufficientCores || strings.HasPrefix(reason, reasonPrefix) || reasons.IsText(reason)
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

// WithoutPreemption returns kube-scheduler's message without what preemption found: the reasons before it are why the pod is
// pending.
func WithoutPreemption(message string) string {
	if at := fitError.FindStringSubmatchIndex(message); at != nil {
		return message[:at[5]+1]
	}
	return message
}

var (
	unanswered = regexp.MustCompile(`(?s)Post "[^"]*/gpushare-scheduler/(\w+)": (.*)`)
	badStatus  = regexp.MustCompile(`failed (\w+) with extender at URL \S*/gpushare-scheduler/\w+, code (\d+)`)
)

// failedCall returns the extender's verb that kube-scheduler could not call according to its message, and why.
func failedCall(message string) (verb, why string, failed bool) {
	if match := unanswered.FindStringSubmatch(message); match != nil {
		return match[1], match[2], true
	}
	if match := badStatus.FindStringSubmatch(message); match != nil {
		return match[1], "HTTP status " + match[2], true
	}
	return "", "", false
}

// maxMessage limits kube-scheduler's message that is kept of a pod, in bytes.
const maxMessage = 8 << 10

// bounded returns the message, of a longer one the first reasons, closed by a full stop like the text of a FitError.
func bounded(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	text := message[:maxMessage]
	if end := strings.LastIndex(text, ", "); end > 0 {
		text = text[:end]
	}
	return strings.ToValidUTF8(text, "") + "."
}

// shorten limits a text of kube-scheduler within a message.
func shorten(text string) string {
	const limit = 300
	text = strings.Join(strings.Fields(text), " ")
	if utf8.RuneCountInString(text) <= limit {
		return text
	}
	return strings.TrimSpace(string([]rune(text)[:limit-1])) + "…"
}

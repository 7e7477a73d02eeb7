package reasons

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/gpushare/gpushare/pkg/protocol"
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

// insufficientMemory and insufficientCores are kube-scheduler's reasons for nodes that lack one of our resources in sum
// (k8s.io/kubernetes pkg/scheduler/framework/plugins/noderesources/fit.go, fitsRequest).
const (
	insufficientMemory = "Insufficient " + string(protocol.ResourceMemory)
	insufficientCores  = "Insufficient " + string(protocol.ResourceCores)
)

// Rejection is the text of a FitError.
type Rejection struct {
	// Text are the reasons, without the number of all nodes and what preemption found.
	Text string
	// Parts are the reasons with their nodes; none if Text is that of a PreFilter plugin.
	Parts []Part
	// Others are the reasons that are neither about GPU memory or the pod's group, nor about what package diagnosis checks itself; empty if there are
	// none.
	Others string
}

// Part is the nodes of a Rejection that have the same reason.
type Part struct {
	Nodes int
	// Text is the reason in kube-scheduler's message.
	Text string
	// Reason is what it says of the pod: the extender's reason of a node, Full for nodes that lack memory or cores in sum, WaitsForGroup
	// or WaitsForTurn, NoNode for nodes that the pod can't use by its constraints or theirs; OtherConstraint for any other text.
	Reason Reason
}

// mark matches what ends a reason: the number of nodes of the next reason, or the full stop after the list of reasons. It also matches
// quoted text, such as an invalid value in a pod's annotation, in which nothing ends a reason.
var mark = regexp.MustCompile(`"(?:[^"\\]|\\.)*"|, \d+ |\.(?: |$)`)

// ends returns where reasons end in the text.
func ends(text string) (at []int) {
	for _, found := range mark.FindAllStringIndex(text, -1) {
		if text[found[0]] != '"' {
			at = append(at, found[0])
		}
	}
	return at
}

// available matches the beginning of a FitError.
var available = regexp.MustCompile(`^0/\d+ nodes are available: `)

// ParseRejection returns the rejection in kube-scheduler's message; false if the message is none.
func ParseRejection(message string) (r Rejection, ok bool) {
	begin := available.FindString(message)
	if begin == "" {
		return Rejection{}, false
	}
	list, from := message[len(begin):], 0
	for _, end := range ends(list) {
		nodes, text, _ := strings.Cut(list[from:end], " ")
		if n, err := strconv.Atoi(nodes); err == nil {
			r.Parts = append(r.Parts, Part{n, text, reasonOf(text)})
		}
		if list[end] == '.' {
			r.Text = list[:end]
			r.Others = r.others()
			return r, true
		}
		from = end + len(", ")
	}
	return Rejection{}, false // The list has no end.
}

func (r *Rejection) others() string {
	if len(r.Parts) == 0 {
		return r.Text
	}
	var others []string
	for _, part := range r.Parts {
		if part.Reason == OtherConstraint || part.Reason == WaitsForTurn {
			others = append(others, fmt.Sprintf("%d %s", part.Nodes, part.Text))
		}
	}
	return strings.Join(others, ", ")
}

// reasonOf returns the Reason of a Part.
func reasonOf(text string) Reason {
	reason, known := byText[text]
	switch {
	case known:
		return reason
	case text == insufficientMemory, text == insufficientCores:
		return Full
	case text == AwaitsTurn:
		return WaitsForTurn
	case strings.HasPrefix(text, keptFor):
		return Reserved
	case strings.HasPrefix(text, resourcesFor):
		return ResourcesReserved
	case strings.HasPrefix(text, groupPrefix):
		return WaitsForGroup
	case slices.ContainsFunc(unusable, func(prefix string) bool { return strings.HasPrefix(text, prefix) }):
		return NoNode
	}
	return OtherConstraint
}

// unusable are the beginnings of kube-scheduler's reasons for nodes that a pod can't use (the constants of the plugins TaintToleration,
// NodeAffinity and NodeUnschedulable, and schedule_one.go, findNodesThatFitPod).
var unusable = []string{
	"node(s) had untolerated taint", "node(s) had taints that the pod didn't tolerate", "node(s) didn't match Pod's node affinity/selector",
	"node(s) were unschedulable", "node(s) didn't satisfy plugin(s) [NodeAffinity]",
}

// byText are the reasons of nodes by their texts, except those that name an item.
var byText = func() map[string]Reason {
	all := map[string]Reason{}
	for _, r := range OfNodes() {
		all[r.Text()] = r
		if text := r.row().demanding; text != "" {
			all[text] = r
		}
	}
	return all
}()

// Has reports whether a node has the reason.
func (r *Rejection) Has(reason Reason) bool {
	for _, part := range r.Parts {
		if part.Reason == reason {
			return true
		}
	}
	return false
}

// ReservedText returns what of a node is reserved, and for which group or pod; empty if nothing is.
func (r *Rejection) ReservedText() string {
	for _, part := range r.Parts {
		switch {
		case strings.HasPrefix(part.Text, keptFor), strings.HasPrefix(part.Text, resourcesFor):
			return part.Text + ", which came first"
		case part.Reason == Reserved, part.Reason == ResourcesReserved:
			return part.Text
		}
	}
	return ""
}

// LacksResources reports whether kube-scheduler's message says that nodes lack resources for the pod: GPU memory, CPU or others (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/noderesources/fit.go, fitsRequest).
func LacksResources(message string) bool {
	return strings.Contains(message, " Insufficient ") || strings.Contains(message, " Too many pods")
}

// WithoutPreemption returns kube-scheduler's message without what preemption found: the reasons before it are why the pod is
// pending.
func WithoutPreemption(message string) string {
	r, ok := ParseRejection(message)
	if !ok {
		return message
	}
	before, _, _ := strings.Cut(message, r.Text)
	return before + r.Text + "."
}

var (
	unanswered = regexp.MustCompile(`(?s)Post "[^"]*/gpushare-scheduler/(\w+)": (.*)`)
	badStatus  = regexp.MustCompile(`failed (\w+) with extender at URL \S*/gpushare-scheduler/\w+, code (\d+)`)
)

// FailedCall returns the extender's verb that kube-scheduler could not call according to its message, and why.
func FailedCall(message string) (verb, why string, failed bool) {
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

// Bounded returns the message, of a longer one the first reasons, closed by a full stop like the text of a FitError.
func Bounded(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	text := message[:maxMessage]
	if end := strings.LastIndex(text, ", "); end > 0 {
		text = text[:end]
	}
	return strings.ToValidUTF8(text, "") + "."
}

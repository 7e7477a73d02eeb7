package diagnosis

import (
	"fmt"
	"regexp"
	"strings"
	"time"
)

// GroupWait is what the group of a pending pod waits for.
type GroupWait struct {
	// Group is the group's namespace and name.
	Group string
	// Reason is the reason that the extender gives kube-scheduler, with or without its prefix "gang: ".
	Reason string
	// Since is the time since which the group waits; zero if unknown.
	Since time.Time
	// Untried is true if kube-scheduler has not tried all members yet. It doesn't try those for which it finds no node.
	Untried bool
	// Invalid is true if the group itself is wrong, so that it can't be placed however much memory is free. A reason of the
	// extender says so itself.
	Invalid bool
	// Incomplete is true if too few members are known to exist.
	Incomplete bool
}

const reasonPrefix = "gang: "

// invalidPrefix precedes the extender's reasons about an invalid group.
const invalidPrefix = "invalid group: "

// invalid reports whether the group is invalid. A nil wait is not.
func (w *GroupWait) invalid() bool {
	return w != nil && (w.Invalid || strings.HasPrefix(strings.TrimPrefix(w.Reason, reasonPrefix), invalidPrefix))
}

// String returns the sentence that is shown to users.
func (w *GroupWait) String() string {
	reason := strings.TrimPrefix(w.Reason, reasonPrefix)
	group := "group " + w.Group
	if strings.HasSuffix(w.Group, "/") {
		group = "its group, which has no name,"
	}
	if w.invalid() {
		return fmt.Sprintf("%s is invalid: %s", group, strings.TrimPrefix(reason, invalidPrefix))
	}
	since := ""
	if !w.Since.IsZero() {
		since = " since " + w.Since.UTC().Format(time.RFC3339)
	}
	return fmt.Sprintf("%s waits%s: %s", group, since, reason)
}

// reasonEnd matches the end of a reason in kube-scheduler's message: another reason follows with its number of nodes, or
// the list of reasons ends with a full stop (k8s.io/kubernetes pkg/scheduler/framework/types.go, FitError.Error).
var reasonEnd = regexp.MustCompile(`, \d+ |\.(?: |$)`)

// GroupReason returns the extender's reason about the pod's group from kube-scheduler's message on the pod, without
// the prefix "gang: "; false if the message has none.
func GroupReason(message string) (string, bool) {
	_, reason, found := strings.Cut(message, reasonPrefix)
	if !found {
		return "", false
	}
	if end := reasonEnd.FindStringIndex(reason); end != nil {
		reason = reason[:end[0]]
	}
	return reason, reason != ""
}

// ReportedWait returns what the pod's group waits for according to kube-scheduler's message on the pod; nil if the message
// has no reason of the extender about a group. It serves programs that don't have the extender's state.
func ReportedWait(group string, pod *Pod) *GroupWait {
	reason, reported := GroupReason(pod.Message)
	if !reported {
		return nil
	}
	return &GroupWait{Group: group, Reason: reason, Since: pod.Created}
}

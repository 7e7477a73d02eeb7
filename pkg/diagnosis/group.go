package diagnosis

import (
	"fmt"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// GroupWait is what the group of a pending pod waits for.
type GroupWait struct {
	// Group is the group's namespace and name.
	Group string
	// Native is true for a PodGroup of Kubernetes: kube-scheduler tries no member before enough members exist.
	Native bool
	Reason reasons.Group
	// Since is the time since which the group waits, see gang.Status; zero if unknown.
	Since time.Time
}

// invalid reports whether the group itself is wrong, so that it can't be placed however much memory is free. A nil wait is not.
func (w *GroupWait) invalid() bool { return w != nil && w.Reason.Invalid() }

// untried reports whether kube-scheduler has not tried all members yet. It doesn't try those for which it finds no node, and those that wait for
// their turn.
func (w *GroupWait) untried() bool {
	return w.Reason.AwaitsOthers() || w.Reason == reasons.GroupAwaitsTurn
}

// String returns the sentence that is shown to users.
func (w *GroupWait) String() string {
	group := "group " + w.Group
	if strings.HasSuffix(w.Group, "/") {
		group = "its group, which has no name,"
	}
	if w.invalid() {
		return fmt.Sprintf("%s is invalid: %s", group, w.Reason.Problem())
	}
	since := ""
	if !w.Since.IsZero() {
		since = " since " + w.Since.UTC().Format(time.RFC3339)
	}
	return fmt.Sprintf("%s waits%s: %s", group, since, w.Reason.Words)
}

// ReportedWait returns what the pod's group waits for according to kube-scheduler's message on the pod; nil if the message
// has no reason of the extender about a group. It serves programs that don't have the extender's state.
func ReportedWait(group string, pod *Pod) *GroupWait {
	reason, reported := reasons.ParseGroup(pod.Message)
	if !reported {
		return nil
	}
	return &GroupWait{Group: group, Reason: reason}
}

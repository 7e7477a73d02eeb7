package reasons

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Group is why members of a group can't be placed or bound. The zero value is no reason.
type Group struct {
	// Label identifies the reason; it is empty for one of another version. The metrics have those that end an attempt to bind a group.
	Label string
	// Words are for users, where it is known that they are about a group.
	Words string
}

// The reasons with constant words.
var (
	GroupUnknown      = Group{"unknown", "the extender doesn't know this pod yet"}
	GroupStarting     = Group{"starting", "the extender has just started to lead"}
	GroupDisagrees    = Group{"disagree", invalidGroup + "the members disagree on the group's size"}
	GroupAwaitsOthers = Group{"awaits_others", "kube-scheduler hasn't tried all other members yet"}
	GroupAwaitsTurn   = Group{"awaits_turn", "not all members have had their turn by fair sharing"}
	GroupUnclear      = Group{"unclear", "its members are of several controllers, and none of these has enough for the group"}
	GroupNoRoom       = Group{"no_room", "there is no room for all members at once"}
	GroupPaused       = Group{"paused", "the group is retried after a pause"}
	GroupBehindFailed = Group{"behind_failed", "other pods of the namespace were not bound in time, so its groups are tried one at a time"}
	GroupOlderFirst   = Group{"older_first", "another group that requests whole cards goes first"}
	GroupSurplus      = Group{"surplus", "the group has enough members; this one is placed once they are bound"}
	GroupBinding      = Group{"binding", "the group is being bound"}
	// GroupOutsideSample ends when the member is nominated to the node.
	GroupOutsideSample = Group{"outside_sample", "memory is reserved on a node that kube-scheduler has not offered yet"}
	GroupEvicting      = Group{"evicting", "the group was partially bound, and is being evicted"}
)

// The reasons that end an attempt to bind a group.
var (
	GroupTimedOut  = Group{"timed_out", "not all members arrived in time"}
	GroupExpired   = Group{"expired", "not all members arrived before their reservations expired"}
	GroupUnplaced  = Group{"unplaced", "no candidate node of a member has room any more"}
	GroupDeleted   = Group{"deleted", "a member was deleted"}
	GroupGaveWay   = Group{"gave_way", "another pod or group takes the memory"}
	GroupPlaceLost = Group{"place_lost", "a card or node of the plan is gone, or has no room any more"}
	GroupChanged   = Group{"changed", "the group's plan has changed"}
	GroupStopping  = Group{"stopping", "this extender doesn't lead any more"}
	GroupNotBound  = Group{"not_bound", "a member could not be bound"}
)

// GroupFailures returns the reasons that end an attempt to bind a group.
func GroupFailures() []Group {
	return []Group{
		GroupTimedOut, GroupExpired, GroupUnplaced, GroupDeleted, GroupChanged, GroupGaveWay, GroupPlaceLost, GroupStopping, GroupNotBound,
	}
}

// Groups returns all reasons with constant words.
func Groups() []Group {
	return append(GroupFailures(), GroupUnknown, GroupStarting, GroupDisagrees, GroupAwaitsOthers, GroupAwaitsTurn, GroupUnclear, GroupNoRoom, GroupPaused,
		GroupBehindFailed, GroupOlderFirst, GroupSurplus, GroupBinding, GroupOutsideSample, GroupEvicting)
}

// GroupIncomplete says that of the members that must be bound together only some exist. Ineligible and Cardless add why others
// don't count. No number follows a comma and a space: kube-scheduler separates the reasons of nodes so.
func GroupIncomplete(existing, size int) Group {
	return Group{labelIncomplete, fmt.Sprintf("%d of %d members exist", existing, size)}
}

// OfSchedulers adds the schedulers that the members name. One of them may not call the extender. It leaves out all but the first three.
func (g Group) OfSchedulers(names []string) Group {
	return g.and(": they name the schedulers %s", strings.Join(names[:min(len(names), 3)], " and "))
}

// Ineligible adds that n members don't count, such as the named pod.
func (g Group) Ineligible(n int, pod string) Group {
	return g.and("; not counted: %d with scheduling gates or an invalid group, such as %s", n, pod)
}

// Cardless adds that n members don't count, because they ask for no cards.
func (g Group) Cardless(n int) Group {
	return g.and(", and %d that ask for no cards don't count", n)
}

// Unfinished adds that fewer pods of a PodGroup exist than kube-scheduler needs to try one of them, after the PodGroup ran.
func (g Group) Unfinished() Group {
	return g.and("; kube-scheduler tries no pod of a PodGroup that has fewer, and doesn't count pods that have ended")
}

// atOnce says how a workload of the kind creates all members at once.
var atOnce = map[string]string{
	"StatefulSet":     "a StatefulSet creates all pods at once only with podManagementPolicy Parallel",
	"LeaderWorkerSet": "a LeaderWorkerSet creates all pods of a replica at once only with startupPolicy LeaderCreated",
	"Job":             "a Job has no more pods at a time than its parallelism, and completed pods that were removed don't count",
	"ReplicaSet":      "the replicas of a Deployment must be at least the group's number",
}

// Stalled adds why no further members are created, if all are of a workload of this kind.
func (g Group) Stalled(kind string) Group {
	g = g.and("; %s", cmp.Or(atOnce[kind], "all must be created at once"))
	if kind == "" {
		return g
	}
	return g.and("; if pods are refused, as by a quota, the Events of their controller say why")
}

func (g Group) and(format string, args ...any) Group {
	g.Words += fmt.Sprintf(format, args...)
	return g
}

// GroupCardless says that none of the group's pods asks for cards.
func GroupCardless(pods int) Group {
	return Group{"cardless", fmt.Sprintf("none of its %d pods asks for cards", pods)}
}

// GroupArriving says that the group has a plan, and its members are on their way to it.
func GroupArriving(arrived, planned int) Group {
	return Group{labelArriving, fmt.Sprintf("memory is reserved for all, and %d of %d members have arrived", arrived, planned)}
}

// GroupBroken says that the group is partially bound. Because adds why the missing members can't be placed.
func GroupBroken(bound, size int) Group {
	return Group{labelBroken, fmt.Sprintf("only %d of %d members are bound", bound, size)}
}

// Because adds the reason of the reason; why can be zero.
func (g Group) Because(why Group) Group {
	if why.Words == "" {
		return g
	}
	return g.and(", %s", why.Words)
}

// GroupInvalid is a problem that only a change of the pods can end.
func GroupInvalid(problem string) Group { return Group{labelInvalid, invalidGroup + problem} }

// Says adds which sizes pods of a group say that disagrees.
func (g Group) Says(pods []string, sizes []int) Group {
	separator := ": "
	for i, pod := range pods {
		g, separator = g.and("%s%s says %d", separator, pod, sizes[i]), ", "
	}
	return g
}

// Invalid reports whether only a change of the pods can end the reason.
func (g Group) Invalid() bool { return g.Label == labelInvalid || g.Label == GroupDisagrees.Label }

// AwaitsOthers reports whether kube-scheduler hasn't tried all members.
func (g Group) AwaitsOthers() bool { return g.Label == GroupAwaitsOthers.Label }

// Incomplete reports whether too few members exist.
func (g Group) Incomplete() bool { return g.Label == labelIncomplete }

// Broken reports whether the group is partially bound.
func (g Group) Broken() bool { return g.Label == labelBroken }

// Problem returns the words of an invalid group where it is known that it is invalid.
func (g Group) Problem() string { return strings.TrimPrefix(g.Words, invalidGroup) }

const (
	labelIncomplete = "incomplete"
	labelArriving   = "arriving"
	labelBroken     = "broken"
	labelInvalid    = "invalid"

	invalidGroup = "invalid group: "
	// groupPrefix precedes the words on the wire.
	groupPrefix = "gang: "
)

// Text returns the text on the wire: of the candidate node for which filter gives the reason, or of a bind's error. It is empty for no reason.
func (g Group) Text() string {
	if g.Words == "" {
		return ""
	}
	return protocol.Shorten(groupPrefix + g.Words)
}

// Error returns Text.
func (g Group) Error() string { return g.Text() }

// ParseGroup returns the reason whose Text is in a message of kube-scheduler; false if none is.
func ParseGroup(message string) (Group, bool) {
	_, words, found := strings.Cut(message, groupPrefix)
	if !found {
		return Group{}, false
	}
	if at := ends(words); len(at) > 0 {
		words = words[:at[0]]
	}
	return Group{groupLabel(words), words}, words != ""
}

// countedGroups match the words of the reasons that count members.
var countedGroups = map[string]*regexp.Regexp{
	labelIncomplete: regexp.MustCompile(`^\d+ of \d+ members exist`),
	labelArriving:   regexp.MustCompile(`^memory is reserved for all, and \d+ of \d+ members have arrived$`),
	labelBroken:     regexp.MustCompile(`^only \d+ of \d+ members are bound`),
}

func groupLabel(words string) string {
	for _, g := range Groups() {
		if g.Words == words || strings.HasPrefix(words, g.Words+": ") { // With details, see Says and OfSchedulers.
			return g.Label
		}
	}
	for label, counted := range countedGroups {
		if counted.MatchString(words) {
			return label
		}
	}
	if strings.HasPrefix(words, invalidGroup) {
		return labelInvalid
	}
	return ""
}

package reasons

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Group is why members of a group can't be placed or bound. The zero value is no reason.
type Group struct {
	// Words are for users, where it is known that they are about a group.
	Words string
}

// The reasons with constant words.
var (
	GroupUnknown      = Group{"the extender doesn't know this pod yet"}
	GroupStarting     = Group{"the extender has just started to lead"}
	GroupDisagrees    = Group{invalidGroup + "the members disagree on the group's size"}
	GroupAwaitsOthers = Group{"kube-scheduler hasn't tried all other members yet"}
	GroupAwaitsTurn   = Group{"not all members have had their turn by fair sharing"}
	GroupUnclear      = Group{"its members are of several controllers, and none of these has enough for the group"}
	GroupNoRoom       = Group{"there is no room for all members at once"}
	GroupPaused       = Group{"the group is retried after a pause"}
	GroupBehindFailed = Group{"other pods of the namespace were not bound in time, so its groups are tried one at a time"}
	GroupOlderFirst   = Group{"another group that requests whole cards goes first"}
	GroupSurplus      = Group{"the group has enough members; this one is placed once they are bound"}
	GroupBinding      = Group{"the group is being bound"}
	// GroupOutsideSample ends when the member is nominated to the node.
	GroupOutsideSample = Group{"memory is reserved on a node that kube-scheduler has not offered yet"}
	GroupEvicting      = Group{"the group was partially bound, and is being evicted"}
)

// The reasons that end an attempt to bind a group.
var (
	GroupTimedOut  = Group{"not all members arrived in time"}
	GroupExpired   = Group{"not all members arrived before their reservations expired"}
	GroupUnplaced  = Group{"no candidate node of a member has room any more"}
	GroupDeleted   = Group{"a member was deleted"}
	GroupGaveWay   = Group{"another pod or group takes the memory"}
	GroupPlaceLost = Group{"a card or node of the plan is gone, or has no room any more"}
	GroupChanged   = Group{"the group's plan has changed"}
	GroupStopping  = Group{"this extender doesn't lead any more"}
	GroupNotBound  = Group{"a member could not be bound"}
)

// GroupFailures are the reasons that end an attempt to bind a group, with their labels for metrics.
var GroupFailures = map[Group]string{
	GroupTimedOut: "timed_out", GroupExpired: "expired", GroupUnplaced: "unplaced", GroupDeleted: "deleted", GroupGaveWay: "gave_way",
	GroupPlaceLost: "place_lost", GroupChanged: "changed", GroupStopping: "stopping", GroupNotBound: "not_bound",
}

// Groups returns all reasons with constant words.
func Groups() []Group {
	return slices.AppendSeq([]Group{
		GroupUnknown, GroupStarting, GroupDisagrees, GroupAwaitsOthers, GroupAwaitsTurn, GroupUnclear, GroupNoRoom, GroupPaused,
		GroupBehindFailed, GroupOlderFirst, GroupSurplus, GroupBinding, GroupOutsideSample, GroupEvicting,
	}, maps.Keys(GroupFailures))
}

// GroupIncomplete says that of the members that must be bound together only some exist. Ineligible and Cardless add why others
// don't count. No number follows a comma and a space: kube-scheduler separates the reasons of nodes so.
func GroupIncomplete(existing, size int) Group {
	return Group{fmt.Sprintf("%d of %d members exist", existing, size)}
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
	return Group{fmt.Sprintf("none of its %d pods asks for cards", pods)}
}

// GroupArriving says that the group has a plan, and its members are on their way to it.
func GroupArriving(arrived, planned int) Group {
	return Group{fmt.Sprintf("memory is reserved for all, and %d of %d members have arrived", arrived, planned)}
}

// GroupBroken says that the group is partially bound. Because adds why the missing members can't be placed.
func GroupBroken(bound, size int) Group {
	return Group{fmt.Sprintf(onlySome+"%d of %d members are bound", bound, size)}
}

// Because adds the reason of the reason; why can be zero.
func (g Group) Because(why Group) Group {
	if why.Words == "" {
		return g
	}
	return g.and(", %s", why.Words)
}

// GroupInvalid is a problem that only a change of the pods can end.
func GroupInvalid(problem string) Group { return Group{invalidGroup + problem} }

// Says adds which sizes pods of a group say that disagrees.
func (g Group) Says(pods []string, sizes []int) Group {
	separator := ": "
	for i, pod := range pods {
		g, separator = g.and("%s%s says %d", separator, pod, sizes[i]), ", "
	}
	return g
}

// Invalid reports whether only a change of the pods can end the reason.
func (g Group) Invalid() bool { return strings.HasPrefix(g.Words, invalidGroup) }

// AwaitsOthers reports whether kube-scheduler hasn't tried all members.
func (g Group) AwaitsOthers() bool { return strings.HasPrefix(g.Words, GroupAwaitsOthers.Words) }

// Incomplete reports whether too few members exist.
func (g Group) Incomplete() bool { return incomplete.MatchString(g.Words) }

var incomplete = regexp.MustCompile(`^\d+ of \d+ members exist`)

// Broken reports whether the group is partially bound.
func (g Group) Broken() bool { return strings.HasPrefix(g.Words, onlySome) }

// Problem returns the words of an invalid group where it is known that it is invalid.
func (g Group) Problem() string { return strings.TrimPrefix(g.Words, invalidGroup) }

const (
	invalidGroup = "invalid group: "
	onlySome     = "only "
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
	return Group{words}, words != ""
}

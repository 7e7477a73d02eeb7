package gang

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Reason is why a member can't be placed or bound. Text is shown to users by kube-scheduler, Label is a label of
// metrics. The package variables have constant texts; functions return reasons with other texts.
type Reason struct{ Label, Text string }

// words is the text where it is known to be about a group.
func (r Reason) words() string { return strings.TrimPrefix(r.Text, "gang: ") }

// The reasons.
var (
	Unknown      = Reason{"unknown", "gang: the extender doesn't know this pod yet"}
	Starting     = Reason{"starting", "gang: the extender has just started to lead"}
	Disagree     = Reason{"disagree", invalidGroup + "the members disagree on the group's size"}
	AwaitsOthers = Reason{"awaits_others", "gang: kube-scheduler hasn't tried all other members yet"}
	NoRoom       = Reason{"no_room", "gang: there is no room for all members at once"}
	Paused       = Reason{"paused", "gang: the group is retried after a pause"}
	OverBudget   = Reason{"over_budget", "gang: waits because groups that could not run used up the budget for reservations"}
	OlderFirst   = Reason{"older_first", "gang: another group that requests whole cards goes first"}
	Surplus      = Reason{"surplus", "gang: the group has enough members; this one is placed once they are bound"}
	Binding      = Reason{"binding", "gang: the group is being bound"}
	// OutsideSample ends when the member is nominated to the node.
	OutsideSample = Reason{"outside_sample", "gang: memory is reserved on a node that kube-scheduler has not offered yet"}
	Evicting      = Reason{"evicting", "gang: the group was partially bound, and is being evicted"}

	TimedOut  = Reason{"timed_out", "gang: not all members arrived in time"}
	Expired   = Reason{"expired", "gang: not all members arrived before their reservations expired"}
	Unplaced  = Reason{"unplaced", "gang: no candidate node of a member has room any more"}
	Deleted   = Reason{"deleted", "gang: a member was deleted"}
	GaveWay   = Reason{"gave_way", "gang: another pod or group takes the memory"}
	PlaceLost = Reason{"place_lost", "gang: a card or node of the plan is gone, or has no room any more"}
	Changed   = Reason{"changed", "gang: the group's plan has changed"}
	Stopping  = Reason{"stopping", "gang: this extender doesn't lead any more"}
	NotBound  = Reason{"not_bound", "gang: a member could not be bound"}
)

// incomplete returns the reason for members of a run that has too few: how many members exist, and why other pods don't count.
func (r *run) incomplete() Reason {
	if r.size() == 0 {
		return r.disagree()
	}
	// kube-scheduler separates the reasons of nodes by commas, with the number of nodes before each.
	parts := []string{fmt.Sprintf("gang: %d of %d members exist", r.existing(), r.size())}
	if n := r.counts[ineligible]; n > 0 {
		first := r.firstName(func(m *member) bool { return m.counted == ineligible })
		parts = append(parts, fmt.Sprintf("not counted: %d with scheduling gates or an invalid group, such as %s", n, first))
	}
	schedulers := map[string]int{}
	if r.counts[foreign] > 0 {
		for _, m := range r.members {
			if m.counted == foreign {
				schedulers[m.Scheduler]++
			}
		}
	}
	names := slices.Sorted(maps.Keys(schedulers))
	for _, name := range names[:min(len(names), 3)] {
		parts = append(parts, fmt.Sprintf("not counted: %d of scheduler %s, which has not called the extender", schedulers[name], name))
	}
	return Reason{"incomplete", strings.Join(parts, "; ")}
}

// firstName returns the name that sorts first of the members that pass.
func (r *run) firstName(pass func(*member) bool) (first string) {
	for _, m := range r.members {
		if pass(m) && (first == "" || m.Name < first) {
			first = m.Name
		}
	}
	return first
}

// arriving returns the reason for members of a run that has a plan.
func (r *run) arriving() Reason {
	return Reason{"arriving", fmt.Sprintf("gang: memory is reserved for all, and %d of %d members have arrived", r.plan.held, len(r.plan.members))}
}

// broken returns the reason for the missing members of a partially bound run. why is the reason why they can't be placed.
func (r *run) broken(why Reason) Reason {
	text := fmt.Sprintf("gang: only %d of %d members are bound", r.counts[bound]+r.finished, r.size())
	if why.Text != "" {
		text += ", " + why.words()
	}
	return Reason{cmp.Or(why.Label, "broken"), text}
}

// invalidGroup is the prefix of the reasons that only a change of the pods can end.
const invalidGroup = "gang: invalid group: "

func invalid(problem string) Reason { return Reason{"invalid", invalidGroup + problem} }

// disagree is Disagree with the first pod of each size, for three sizes at most.
func (r *run) disagree() Reason {
	var says []string
	for _, size := range slices.Sorted(maps.Keys(r.sizes)) {
		first := r.firstName(func(m *member) bool { return m.counted != other && m.counted != succeeded && m.Size == size })
		if says = append(says, fmt.Sprintf("%s says %d", first, size)); len(says) == 3 {
			break
		}
	}
	if len(says) < 2 {
		return Disagree
	}
	return Reason{Disagree.Label, Disagree.Text + ": " + strings.Join(says, ", ")}
}

// Error returns the text.
func (r Reason) Error() string { return r.Text }

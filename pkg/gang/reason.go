package gang

import "fmt"

// Reason is why a member can't be placed or bound. Text is shown to users by kube-scheduler, Label is a label of
// metrics. Both are constant, except for the numbers of incomplete and the problem of invalid.
type Reason struct{ Label, Text string }

// The reasons.
var (
	Unknown      = Reason{"unknown", "gang: the extender doesn't know this pod yet"}
	Disagree     = Reason{"disagree", "gang: the members disagree on the group's size"}
	AwaitsOthers = Reason{"awaits_others", "gang: kube-scheduler hasn't tried all other members yet"}
	NoRoom       = Reason{"no_room", "gang: there is no room for all members at once"}
	Paused       = Reason{"paused", "gang: the group is retried after a pause"}
	OlderFirst   = Reason{"older_first", "gang: another group that requests whole cards goes first"}
	Surplus      = Reason{"surplus", "gang: the group has enough members; this one is placed once they are bound"}
	Binding      = Reason{"binding", "gang: the group is being bound"}
	Evicting     = Reason{"evicting", "gang: the group was partially bound, and is being evicted"}

	TimedOut  = Reason{"timed_out", "gang: not all members arrived in time"}
	Expired   = Reason{"expired", "gang: not all members arrived before their reservations expired"}
	Unplaced  = Reason{"unplaced", "gang: no candidate node of a member has room any more"}
	Deleted   = Reason{"deleted", "gang: a member was deleted"}
	GaveWay   = Reason{"gave_way", "gang: a group that goes first needs the memory"}
	PlaceLost = Reason{"place_lost", "gang: a card or node of the plan is gone"}
	Changed   = Reason{"changed", "gang: the group's plan has changed"}
	Stopping  = Reason{"stopping", "gang: this extender doesn't lead any more"}
	NotBound  = Reason{"not_bound", "gang: a member could not be bound"}
)

func incomplete(exist, size int) Reason {
	return Reason{"incomplete", fmt.Sprintf("gang: %d of %d members exist", exist, size)}
}

func invalid(problem string) Reason { return Reason{"invalid", "gang: " + problem} }

// Error returns the text.
func (r Reason) Error() string { return r.Text }

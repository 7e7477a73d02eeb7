package gang

import "fmt"

// Reason is why a member can't be placed or bound. Text is shown to users by kube-scheduler, Label is a label of
// metrics. Both are constant, except for the numbers of incomplete and the problem of invalid.
type Reason struct{ Label, Text string }

// The reasons.
var (
	Unknown      = Reason{"unknown", "gang: the extender hasn't seen this pod yet"}
	Disagree     = Reason{"disagree", "gang: the members disagree on the group's size"}
	AwaitsOthers = Reason{"awaits_others", "gang: other members have yet to come to the scheduler"}
	NoRoom       = Reason{"no_room", "gang: there is no room for all members at once"}
	Paused       = Reason{"paused", "gang: waits before the group is tried again"}
	OlderFirst   = Reason{"older_first", "gang: another group that asks for whole cards goes first"}
	Surplus      = Reason{"surplus", "gang: follows once the group runs, which has enough members already"}
	Binding      = Reason{"binding", "gang: the group is being bound"}
	Evicting     = Reason{"evicting", "gang: the group was bound in part, and is being evicted"}

	TimedOut  = Reason{"timed_out", "gang: not all members came in time"}
	Expired   = Reason{"expired", "gang: not all members came before their reservations expired"}
	Unplaced  = Reason{"unplaced", "gang: no candidate node of a member has room any more"}
	Deleted   = Reason{"deleted", "gang: a member was deleted"}
	GaveWay   = Reason{"gave_way", "gang: an older group needs the room"}
	PlaceLost = Reason{"place_lost", "gang: a card or node of the plan is gone"}
	Changed   = Reason{"changed", "gang: the group's places have changed since"}
	Stopping  = Reason{"stopping", "gang: this extender doesn't lead any more"}
	NotBound  = Reason{"not_bound", "gang: a member could not be bound"}
)

func incomplete(exist, size int) Reason {
	return Reason{"incomplete", fmt.Sprintf("gang: %d of %d members exist", exist, size)}
}

func invalid(problem string) Reason { return Reason{"invalid", "gang: " + problem} }

// Error returns the text.
func (r Reason) Error() string { return r.Text }

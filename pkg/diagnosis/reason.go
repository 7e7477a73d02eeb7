package diagnosis

// Reason is the reason why a pod is pending, in one word: its cause. It is a label value of the metrics.
type Reason string

// The reasons.
const (
	// Gated: the pod has scheduling gates.
	Gated Reason = "gated"
	// NotTried: kube-scheduler has not tried the pod for UntriedAfter: perhaps no scheduler of the pod's schedulerName runs.
	NotTried Reason = "not_tried"
	// SchedulerError: kube-scheduler could not try or bind the pod. Mostly it can't reach the extender.
	SchedulerError Reason = "scheduler_error"
	// Nominated: the pod is nominated to a node. kube-scheduler tries it there next, or pods of lower priority are leaving.
	Nominated Reason = "nominated"
	// InvalidRequest: no node can give the pod what it asks for, for example because its memory can't be divided over its cards.
	InvalidRequest Reason = "invalid_request"
	// InvalidGroup: the annotations or labels that name the pod's group are invalid, or those of its members contradict each
	// other.
	InvalidGroup Reason = "invalid_group"
	// WaitsForGroup: the pod is a member of a group that isn't placed yet. The message says what the group waits for.
	WaitsForGroup Reason = "waits_for_group"
	// WaitsForTurn: tenants share the cluster fairly, and it isn't the pod's turn.
	WaitsForTurn Reason = "waits_for_turn"
	// Fits: a card has room, and kube-scheduler is about to try the pod: for the first time, or again because the card had no
	// room at its last try.
	Fits Reason = "fits"
	// OtherConstraint: a card has room, but kube-scheduler has rejected the pod for something else, such as a lack of CPU.
	OtherConstraint Reason = "other_constraint"
	// KeptForGroup: a card has enough free memory, but it is reserved for a group that has waited long.
	KeptForGroup Reason = "kept_for_group"
	// KeptForNominated: a card has enough free memory, but it is reserved for a pod that is nominated to the node.
	KeptForNominated Reason = "kept_for_nominated"
	// FailedCard: a card has room, but the node's sum, which kube-scheduler counts, has none: the sum doesn't include a failed card, and
	// the pods on that card still count.
	FailedCard Reason = "failed_card"
	// WaitsForTermination: a card has room once pods that are being deleted have ended.
	WaitsForTermination Reason = "waits_for_termination"
	// Fragmented: a node has enough free memory in total, but no card has.
	Fragmented Reason = "fragmented"
	// Full: a card would be large enough, but other pods use too much of it.
	Full Reason = "full"
	// Crowded: a card has room, but it takes no more containers.
	Crowded Reason = "crowded"
	// Unhealthy: only unhealthy cards would be large enough.
	Unhealthy Reason = "unhealthy"
	// TooLarge: no card is large enough, even if empty.
	TooLarge Reason = "too_large"
	// NoNode: the pod can't use any of the nodes that share GPU memory.
	NoNode Reason = "no_node"
)

// words are the reasons in words for a user. The order is that of Reasons.
var words = []struct {
	reason Reason
	words  string
}{
	{Gated, "held back by scheduling gates"},
	{NotTried, "no scheduler has tried it"},
	{SchedulerError, "kube-scheduler reports an error"},
	{Nominated, "nominated to a node"},
	{InvalidRequest, "its request is invalid"},
	{InvalidGroup, "its group is invalid"},
	{WaitsForGroup, "waits for its group"},
	{WaitsForTurn, "waits for its turn"},
	{Fits, "about to be tried"},
	{OtherConstraint, "something other than GPU memory"},
	{KeptForGroup, "memory is kept for a group"},
	{KeptForNominated, "memory is kept for a nominated pod"},
	{FailedCard, "a failed card blocks its node"},
	{WaitsForTermination, "waits for pods to terminate"},
	{Fragmented, "free memory is in pieces"},
	{Full, "cards are full"},
	{Crowded, "cards take no more containers"},
	{Unhealthy, "cards are unhealthy"},
	{TooLarge, "no card is large enough"},
	{NoNode, "no node can be used"},
}

// Words returns the reason in a few words, for lists in which the message has no room.
func (r Reason) Words() string {
	for _, w := range words {
		if w.reason == r {
			return w.words
		}
	}
	return string(r)
}

// Reasons returns all reasons.
func Reasons() []Reason {
	reasons := make([]Reason, len(words))
	for i, w := range words {
		reasons[i] = w.reason
	}
	return reasons
}

package diagnosis

import (
	"fmt"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Diagnosis is why a pod is pending.
type Diagnosis struct {
	Reason reasons.Reason
	// Message is the explanation that is shown to users.
	Message string
	// Position is where the pod is in the queue; DiagnoseAll sets it.
	Position Position
}

// UntriedAfter is how long kube-scheduler may leave a pod untried before its diagnosis says so. A scheduler that runs tries a
// new pod at once, and in a long queue after seconds.
const UntriedAfter = 30 * time.Second

// Diagnoser diagnoses pods against the state of the nodes at one moment. What pods with equal requests and constraints have in
// common is computed once. A Diagnoser is not safe for concurrent use.
type Diagnoser struct {
	// Turns are the turns of the pods that wait for one; nil if tenants don't share the cluster fairly, or if only another
	// process knows.
	Turns map[gpu.PodUID]reasons.Turn
	// Awaited are the nodes on which cards in use are reserved for pods; nil if only another process knows.
	Awaited map[gpu.PodUID]string

	now time.Time
	// active are the names of the schedulers that have tried a pending pod.
	active map[string]bool
	// podsOnly is true if nodes are unknown, see PodsOnly.
	podsOnly bool
	nodes    nodeFigures
	eligible map[unique.Handle[string]]*eligibleNodes // by Pod.Constraints
	// eligibleKept is the number of nodes in eligible.
	eligibleKept int
	rooms        map[roomKey]room
	// messages are the rejections by message of kube-scheduler; nil for a message that is none.
	messages map[string]*reasons.Rejection
}

// NewDiagnoser returns a Diagnoser for the nodes, which must be sorted by name and have cards. pending are all pending pods:
// they show which schedulers run.
func NewDiagnoser(nodes []Node, pending []*Pod, now time.Time) *Diagnoser {
	d := &Diagnoser{
		now: now, active: map[string]bool{}, nodes: newNodeFigures(nodes), eligible: map[unique.Handle[string]]*eligibleNodes{}, rooms: map[roomKey]room{},
		messages: map[string]*reasons.Rejection{},
	}
	for _, pod := range pending {
		if pod.Tried {
			d.active[pod.Scheduler] = true
		}
	}
	return d
}

// DiagnoseAll returns the diagnoses of all pending pods, with their positions, which the messages have too. wait returns what the group of the i-th
// pod waits for, see Diagnose.
func (d *Diagnoser) DiagnoseAll(pods []*Pod, wait func(i int) *GroupWait) []Diagnosis {
	all, waits := make([]Diagnosis, len(pods)), make([]*GroupWait, len(pods))
	for i, pod := range pods {
		waits[i] = wait(i)
		all[i] = d.diagnose(pod, waits[i])
	}
	d.setPositions(all, pods, waits)
	for i := range all {
		if text := all[i].Position.String(); text != "" {
			all[i].Message += "; " + text
		}
		if node := d.Awaited[pods[i].UID]; node != "" {
			all[i].Message += fmt.Sprintf("; cards of %s are reserved for it, and it gets them when pods there have ended", node)
		}
		all[i].Message = protocol.Shorten(all[i].Message)
	}
	return all
}

// Diagnose returns why the pod, which has no node, is pending. wait is what the pod's group waits for; nil if the pod doesn't
// wait for a group. It is the reason of the first rule that matches.
func (d *Diagnoser) Diagnose(pod *Pod, wait *GroupWait) Diagnosis {
	found := d.diagnose(pod, wait)
	found.Message = protocol.Shorten(found.Message)
	return found
}

func (d *Diagnoser) diagnose(pod *Pod, wait *GroupWait) Diagnosis {
	c := d.newCase(pod, wait)
	for _, rule := range rules {
		if rule.matches(c) {
			return Diagnosis{Reason: rule.reason, Message: rule.message(c)}
		}
	}
	message := c.room.message
	if !d.podsOnly { // There it is the message.
		message += c.alsoSaid()
	}
	return Diagnosis{Reason: c.room.reason, Message: message + c.more()}
}

// podCase is all that the rules know of a pod.
type podCase struct {
	*Pod
	wait *GroupWait
	// turn is the turn for which the pod waits; nil if it waits for none.
	turn *reasons.Turn
	// turnUnknown is true if the gate of fair shares is the pod's only one, and its turn isn't known: it waits for nothing else, so what
	// the nodes allow counts.
	turnUnknown bool
	// heldBack is true if turns aren't known, and the extender has rejected the pod because it waits for one.
	heldBack bool
	// nominated is true if the pod has a valid nomination.
	nominated bool
	// nomineeFits is true if a card of the nominated node has room: no pod that uses GPU memory has to leave any more.
	nomineeFits bool
	// room is what the nodes and their cards allow.
	room room
	// untried is how long kube-scheduler has left the pod untried; zero if it tried it.
	untried time.Duration
	// rejection is kube-scheduler's; nil if its message is none.
	rejection *reasons.Rejection
	// schedulerActive is true if the pod's scheduler has tried other pods.
	schedulerActive bool
}

func (d *Diagnoser) newCase(pod *Pod, wait *GroupWait) *podCase {
	c := &podCase{Pod: pod, wait: wait, schedulerActive: d.active[pod.Scheduler]}
	if turn, waits := d.Turns[pod.UID]; waits {
		c.turn = &turn
	}
	c.turnUnknown = c.turn == nil && len(pod.Gates) == 1 && pod.Gates[0] == protocol.GateFairShare && !d.podsOnly
	if len(pod.Gates) > 0 && c.turn == nil && !c.turnUnknown {
		return c // The others don't count until the gates are removed.
	}
	if i, found := d.nodes.Position(pod.NominatedNode); found {
		node := &d.nodes.nodes[i]
		c.nomineeFits = placement.Fit(node.Cards, pod.Demand()) == reasons.Fits
		c.nominated = node.NominationValid(eligibility.Parse(pod.Constraints), node.Cards, pod.Demand(), node.leavingFor(pod.Pod, d.now))
	}
	c.room, c.rejection = d.roomFor(pod), d.rejection(pod.Message)
	c.heldBack = d.Turns == nil && c.rejection != nil && c.rejection.Has(reasons.WaitsForTurn)
	if !pod.Tried && !pod.Created.IsZero() {
		c.untried = max(d.now.Sub(pod.Created), 0)
	}
	return c
}

// rejection returns the rejection in a message of kube-scheduler; nil if it is none. Equal pods have equal messages.
func (d *Diagnoser) rejection(message string) *reasons.Rejection {
	found, known := d.messages[message]
	if !known {
		if r, rejected := reasons.ParseRejection(message); rejected {
			found = &r
		}
		d.messages[message] = found
	}
	return found
}

// rule is a reason with the pods for which it holds, if no rule before it does.
type rule struct {
	reason  reasons.Reason
	matches func(*podCase) bool
	message func(*podCase) string
}

// rules are in the order in which a user has to solve them: what holds whatever the cluster's state comes first, then whether
// kube-scheduler tries the pod at all, then its group, then what kube-scheduler says. A pod for which none matches has the
// reason that nodes and cards give.
var rules = []rule{
	{reasons.InvalidRequest, func(c *podCase) bool { return c.RequestError != "" }, func(c *podCase) string {
		return "no node can give the pod what it asks for: " + c.RequestError
	}},
	{reasons.InvalidGroup, func(c *podCase) bool { return c.wait.invalid() }, func(c *podCase) string { return c.wait.String() }},
	{reasons.Gated, func(c *podCase) bool { return len(c.Gates) > 0 && c.turn == nil && !c.turnUnknown }, (*podCase).gatedText},
	{reasons.Nominated, func(c *podCase) bool { return c.nominated && !c.callFailed() }, (*podCase).nominatedText},
	{reasons.NoNode, roomIs(reasons.NoNode), func(c *podCase) string { return c.room.message + c.more() }},
	{reasons.TooLarge, roomIs(reasons.TooLarge), func(c *podCase) string { return c.tooLarge() + c.more() }},
	{reasons.Unhealthy, roomIs(reasons.Unhealthy), func(c *podCase) string { return c.room.message + c.more() }},
	{reasons.WaitsForGroup, func(c *podCase) bool {
		return c.wait != nil && (c.turn != nil && c.turn.Obstacle == reasons.ObstacleIncomplete || c.turnUnknown && c.wait.Reason.Incomplete())
	}, func(c *podCase) string { return c.wait.String() }},
	{reasons.WaitsForTurn, func(c *podCase) bool { return c.turn != nil && !c.failedAtTurn() }, (*podCase).turnText},
	{reasons.WaitsForTurn, func(c *podCase) bool { return c.heldBack }, func(*podCase) string {
		return "the extender holds it back until its turn: kubectl inspect gpushare --shares"
	}},
	{reasons.Gated, func(c *podCase) bool { return c.turnUnknown }, (*podCase).gatedText},
	{reasons.NotTried, (*podCase).notTried, func(c *podCase) string {
		return c.untriedText() + ": is a scheduler of this name running?" + c.waitText()
	}},
	{reasons.SchedulerError, (*podCase).callFailed, (*podCase).failedCallText},
	{reasons.OtherConstraint, (*podCase).otherConstraint, (*podCase).otherConstraintText},
	{reasons.WaitsForGroup, (*podCase).waits, func(c *podCase) string { return c.wait.String() }},
	{reasons.SchedulerError, func(c *podCase) bool { return c.room.reason == reasons.Fits && c.Failed }, func(c *podCase) string {
		return "kube-scheduler reports an error, and tries the pod again: " + Excerpt(c.Message) + c.pauseText()
	}},
	{reasons.ReservedForOther, (*podCase).reservedForOther, func(c *podCase) string {
		return fmt.Sprintf("%s, but %s", c.room.has, c.rejection.ReservedText())
	}},
	{reasons.Fits, roomIs(reasons.Fits), (*podCase).fitsText},
}

func roomIs(reason reasons.Reason) func(*podCase) bool {
	return func(c *podCase) bool { return c.room.reason == reason }
}

// failedAtTurn reports whether the pod pauses because at its last turn kube-scheduler could not place or bind it, for a reason other than memory.
// At its next turn that will be the same, unless the reason goes.
func (c *podCase) failedAtTurn() bool {
	return c.turn != nil && c.turn.Obstacle == reasons.ObstaclePaused &&
		(c.callFailed() || c.otherConstraint() || c.room.reason == reasons.Fits && c.Failed)
}

// notTried reports whether kube-scheduler has left the pod untried for too long. A pod for which no card has room can be far
// behind in the queue; it only counts if its scheduler has tried no other pod either.
func (c *podCase) notTried() bool {
	if c.wait != nil && c.wait.Native && c.wait.Reason.Incomplete() {
		return false
	}
	return c.untried >= UntriedAfter && (c.room.reason == reasons.Fits || !c.schedulerActive)
}

func (c *podCase) callFailed() bool {
	_, _, failed := reasons.FailedCall(c.Message)
	return failed
}

// otherConstraint reports whether a card has room, and kube-scheduler has rejected the pod for something else than GPU memory.
func (c *podCase) otherConstraint() bool {
	if c.room.reason != reasons.Fits || c.wait != nil && !c.wait.untried() {
		return false
	}
	if c.rejection == nil {
		return c.Tried && !c.Failed // A text that is not kube-scheduler's list of nodes says nothing about GPU memory.
	}
	return c.rejection.Others != ""
}

// waits reports whether the pod waits for its group, rather than for memory: kube-scheduler doesn't try a member for which the
// nodes lack memory, so the group waits for that member.
func (c *podCase) waits() bool {
	return c.wait != nil && (!c.wait.untried() || c.room.reason == reasons.Fits)
}

func (c *podCase) reservedForOther() bool {
	return c.room.reason == reasons.Fits && c.rejection != nil && c.rejection.ReservedText() != ""
}

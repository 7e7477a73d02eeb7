package diagnosis

import (
	"fmt"
	"slices"
	"strings"
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
	choices  map[unique.Handle[string]]*choice // by Pod.Constraints
	// chosen is the number of nodes in choices.
	chosen   int
	verdicts map[verdictKey]verdict
	// messages are the rejections by message of kube-scheduler; nil for a message that is none.
	messages map[string]*rejection
}

// NewDiagnoser returns a Diagnoser for the nodes, which must be sorted by name and have cards. pending are all pending pods:
// they show which schedulers run.
func NewDiagnoser(nodes []Node, pending []*Pod, now time.Time) *Diagnoser {
	d := &Diagnoser{
		now: now, active: map[string]bool{}, nodes: newNodeFigures(nodes), choices: map[unique.Handle[string]]*choice{}, verdicts: map[verdictKey]verdict{},
		messages: map[string]*rejection{},
	}
	for _, pod := range pending {
		if pod.Tried {
			d.active[pod.Scheduler] = true
		}
	}
	return d
}

// DiagnoseAll returns the diagnoses of all pending pods, and their positions, which the messages have too. wait returns what the group of the i-th
// pod waits for, see Diagnose.
func (d *Diagnoser) DiagnoseAll(pods []*Pod, wait func(i int) *GroupWait) ([]Diagnosis, []Position) {
	all, waits := make([]Diagnosis, len(pods)), make([]*GroupWait, len(pods))
	for i, pod := range pods {
		waits[i] = wait(i)
		all[i] = d.diagnose(pod, waits[i])
	}
	positions := d.positions(pods, waits, all)
	for i := range all {
		if text := positions[i].String(); text != "" {
			all[i].Message += "; " + text
		}
		if node := d.Awaited[pods[i].UID]; node != "" {
			all[i].Message += fmt.Sprintf("; cards of %s are reserved for it, and it gets them when pods there have ended", node)
		}
		all[i].Message = protocol.Shorten(all[i].Message)
	}
	return all, positions
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
			return Diagnosis{rule.reason, rule.message(c)}
		}
	}
	message := c.verdict.message
	if !d.podsOnly { // There it is the message.
		message += c.alsoSaid()
	}
	return Diagnosis{c.verdict.reason, message + c.more()}
}

// alsoSaid returns what kube-scheduler says about nodes besides what the extender and a Diagnoser check.
func (c *podCase) alsoSaid() string {
	if c.rejection == nil || c.rejection.others == "" {
		return ""
	}
	return "; kube-scheduler also says: " + Shorten(c.rejection.others)
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
	// verdict is what the nodes and their cards allow.
	verdict verdict
	// untried is how long kube-scheduler has left the pod untried; zero if it tried it.
	untried time.Duration
	// rejection is kube-scheduler's; nil if its message is none.
	rejection *rejection
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
	c.verdict, c.rejection = d.verdict(pod), d.rejection(pod.Message)
	c.heldBack = d.Turns == nil && c.rejection != nil && c.rejection.Has(reasons.WaitsForTurn)
	if !pod.Tried && !pod.Created.IsZero() {
		c.untried = max(d.now.Sub(pod.Created), 0)
	}
	return c
}

// rejection returns the rejection in a message of kube-scheduler; nil if it is none. Equal pods have equal messages.
func (d *Diagnoser) rejection(message string) *rejection {
	found, known := d.messages[message]
	if !known {
		if r, rejected := rejectionIn(message); rejected {
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
	{reasons.NoNode, verdictIs(reasons.NoNode), func(c *podCase) string { return c.verdict.message + c.more() }},
	{reasons.TooLarge, verdictIs(reasons.TooLarge), func(c *podCase) string { return c.tooLarge() + c.more() }},
	{reasons.Unhealthy, verdictIs(reasons.Unhealthy), func(c *podCase) string { return c.verdict.message + c.more() }},
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
	{reasons.SchedulerError, func(c *podCase) bool { return c.verdict.reason == reasons.Fits && c.Failed }, func(c *podCase) string {
		return "kube-scheduler reports an error, and tries the pod again: " + Shorten(c.Message) + c.pauseText()
	}},
	{reasons.ReservedForOther, (*podCase).reservedForOther, func(c *podCase) string {
		return fmt.Sprintf("%s, but %s", c.verdict.has, c.rejection.Kept())
	}},
	{reasons.Fits, verdictIs(reasons.Fits), (*podCase).fitsText},
}

func verdictIs(reason reasons.Reason) func(*podCase) bool {
	return func(c *podCase) bool { return c.verdict.reason == reason }
}

func (c *podCase) nominatedText() string {
	if c.nomineeFits {
		return fmt.Sprintf("it is nominated to %s, which has GPU memory for it: "+
			"it is tried there next, or pods of lower priority that use none are still leaving", c.NominatedNode)
	}
	return fmt.Sprintf("pods of lower priority are leaving %s to make room for it", c.NominatedNode)
}

// failedAtTurn reports whether the pod pauses because at its last turn kube-scheduler could not place or bind it, for a reason other than memory.
// At its next turn that will be the same, unless the reason goes.
func (c *podCase) failedAtTurn() bool {
	return c.turn != nil && c.turn.Obstacle == reasons.ObstaclePaused &&
		(c.callFailed() || c.otherConstraint() || c.verdict.reason == reasons.Fits && c.Failed)
}

func (c *podCase) pauseText() string {
	if c.failedAtTurn() {
		return "; " + c.turn.Obstacle.String()
	}
	return ""
}

func (c *podCase) turnText() string {
	if c.rejection != nil && c.rejection.Has(reasons.WaitsForTurn) {
		return c.turn.String() // The message says nothing else about the nodes that the extender rejects.
	}
	return c.turn.String() + c.alsoSaid()
}

// notTried reports whether kube-scheduler has left the pod untried for too long. A pod for which no card has room can be far
// behind in the queue; it only counts if its scheduler has tried no other pod either.
func (c *podCase) notTried() bool {
	if c.wait != nil && c.wait.Native && c.wait.Reason.Incomplete() {
		return false
	}
	return c.untried >= UntriedAfter && (c.verdict.reason == reasons.Fits || !c.schedulerActive)
}

func (c *podCase) untriedText() string {
	if c.ungated {
		return fmt.Sprintf("scheduler %q has not tried it since its scheduling gates were removed", c.Scheduler)
	}
	return fmt.Sprintf("scheduler %q has not tried it for %s", c.Scheduler, coarse(c.untried))
}

// coarse formats a duration in whole minutes, hours or days, so that a message changes rarely and views agree on it.
func coarse(d time.Duration) string {
	switch {
	case d < time.Minute:
		return d.Truncate(UntriedAfter).String()
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

func (c *podCase) callFailed() bool {
	_, _, failed := reasons.FailedCall(c.Message)
	return failed
}

func (c *podCase) failedCallText() string {
	verb, why, _ := reasons.FailedCall(c.Message)
	switch {
	case why == "HTTP status 403":
		return fmt.Sprintf("kube-scheduler's %s call is rejected with %s: the extender's --client-names doesn't have the common name of its certificate, "+
			"or a proxy is between them", verb, why)
	case why == "HTTP status 404", why == "HTTP status 405": // The web page answers POST with the latter.
		return fmt.Sprintf("kube-scheduler's %s call of the extender fails: %s: urlPrefix in kube-scheduler's configuration must have the port of "+
			"--listen-address, not that of the web page, and end with /gpushare-scheduler", verb, why)
	case why == "HTTP status 400":
		return fmt.Sprintf("kube-scheduler's %s call of the extender fails: %s: if the extender has a certificate, urlPrefix in kube-scheduler's "+
			"configuration must start with https://", verb, why)
	case strings.HasPrefix(why, "HTTP status"):
		return fmt.Sprintf("kube-scheduler's %s call of the extender fails: %s", verb, why)
	}
	return fmt.Sprintf("the extender does not answer kube-scheduler's %s call: %s", verb, Shorten(why)) + c.pauseText()
}

// otherConstraint reports whether a card has room, and kube-scheduler has rejected the pod for something else than GPU memory.
func (c *podCase) otherConstraint() bool {
	if c.verdict.reason != reasons.Fits || c.wait != nil && !c.wait.untried() {
		return false
	}
	if c.rejection == nil {
		return c.Tried && !c.Failed // A text that is not kube-scheduler's list of nodes says nothing about GPU memory.
	}
	return c.rejection.others != ""
}

func (c *podCase) otherConstraintText() string {
	scheduler, text := fmt.Sprintf("scheduler %q", c.Scheduler), c.Message
	if c.rejection != nil {
		scheduler, text = "kube-scheduler", c.rejection.Text
	}
	return fmt.Sprintf("%s, but %s rejects the pod: %s", c.verdict.has, scheduler, Shorten(text)) + c.waitText() + c.pauseText()
}

// waits reports whether the pod waits for its group, rather than for memory: kube-scheduler doesn't try a member for which the
// nodes lack memory, so the group waits for that member.
func (c *podCase) waits() bool {
	return c.wait != nil && (!c.wait.untried() || c.verdict.reason == reasons.Fits)
}

func (c *podCase) reservedForOther() bool {
	return c.verdict.reason == reasons.Fits && c.rejection != nil && c.rejection.Kept() != ""
}

func (c *podCase) fitsText() string {
	if !c.Tried {
		return c.verdict.has + ": kube-scheduler has not tried it yet"
	}
	return c.verdict.has + ": kube-scheduler found none at its last try, and tries the pod again"
}

// more returns what else is to be said about a pod after the explanation of the verdict.
func (c *podCase) more() string {
	if c.untried >= UntriedAfter {
		return "; " + c.untriedText() + c.waitText()
	}
	return c.waitText()
}

func (c *podCase) waitText() string {
	if c.wait == nil {
		return ""
	}
	return "; " + c.wait.String()
}

// firstOf returns the first of the names, and the number of others.
func firstOf(names []string) string { return listed(names[:min(len(names), maxNames)], len(names)) }

// listed returns these names of n, and the number of others.
func listed(names []string, n int) string {
	text := strings.Join(names, ", ")
	if others := n - len(names); others > 0 {
		text += fmt.Sprintf(" and %d more", others)
	}
	return text
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

// gatedText is shown of a pod with scheduling gates of which nothing else is known.
func (c *podCase) gatedText() string {
	text := "the pod is held back by its scheduling gates: " + firstOf(c.Gates)
	if slices.Contains(c.Gates, protocol.GateFairShare) {
		text += "; with fair sharing the extender removes " + protocol.GateFairShare + " at the pod's turn: kubectl inspect gpushare --shares"
	}
	return text
}

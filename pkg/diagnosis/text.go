package diagnosis

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// This file has the sentences of a Diagnosis: first those about the pod (for the rules in diagnose.go), then those about what nodes and cards have
// for it (room.go).

// more returns what follows the message of the room.
func (c *podCase) more() string {
	if c.untried >= UntriedAfter {
		return "; " + c.untriedText() + c.waitText()
	}
	return c.waitText()
}

// alsoSaid returns what kube-scheduler says about nodes besides what the extender and a Diagnoser check.
func (c *podCase) alsoSaid() string {
	if c.rejection == nil || c.rejection.Others == "" {
		return ""
	}
	return "; kube-scheduler also says: " + Excerpt(c.rejection.Others)
}

func (c *podCase) waitText() string {
	if c.wait == nil {
		return ""
	}
	return "; " + c.wait.String()
}

func (c *podCase) pauseText() string {
	if c.failedAtTurn() {
		return "; " + c.turn.Obstacle.String()
	}
	return ""
}

// gatedText is shown of a pod with scheduling gates of which nothing else is known.
func (c *podCase) gatedText() string {
	text := "the pod is held back by its scheduling gates: " + FirstOf(c.Gates)
	if slices.Contains(c.Gates, protocol.GateFairShare) {
		text += "; with fair sharing the extender removes " + protocol.GateFairShare + " at the pod's turn: kubectl inspect gpushare --shares"
	}
	return text
}

func (c *podCase) nominatedText() string {
	if c.nomineeFits {
		return fmt.Sprintf("it is nominated to %s, which has GPU memory for it: "+
			"it is tried there next, or pods of lower priority that use none are still leaving", c.NominatedNode)
	}
	return fmt.Sprintf("pods of lower priority are leaving %s to make room for it", c.NominatedNode)
}

func (c *podCase) turnText() string {
	if c.rejection != nil && c.rejection.Has(reasons.WaitsForTurn) {
		return c.turn.String() // The message says nothing else about the nodes that the extender rejects.
	}
	return c.turn.String() + c.alsoSaid()
}

func (c *podCase) untriedText() string {
	if c.ungated {
		return fmt.Sprintf("scheduler %q has not tried it since its scheduling gates were removed", c.Scheduler)
	}
	return fmt.Sprintf("scheduler %q has not tried it for %s", c.Scheduler, coarse(c.untried))
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
	return fmt.Sprintf("the extender does not answer kube-scheduler's %s call: %s", verb, Excerpt(why)) + c.pauseText()
}

func (c *podCase) otherConstraintText() string {
	scheduler, text := fmt.Sprintf("scheduler %q", c.Scheduler), c.Message
	if c.rejection != nil {
		scheduler, text = "kube-scheduler", c.rejection.Text
	}
	return fmt.Sprintf("%s, but %s rejects the pod: %s", c.room.has, scheduler, Excerpt(text)) + c.waitText() + c.pauseText()
}

func (c *podCase) fitsText() string {
	if !c.Tried {
		return c.room.has + ": kube-scheduler has not tried it yet"
	}
	return c.room.has + ": kube-scheduler found none at its last try, and tries the pod again"
}

// tooLarge explains the request of a pod for which no card is large enough.
func (c *podCase) tooLarge() string {
	if c.room.unit == 0 { // No node is known, see PodsOnly.
		return c.room.message
	}
	request := c.room.unit.Format(c.Request)
	switch mistake, found := c.quantityMistake(); {
	case found:
		request = mistake
	case c.asks != "":
		request += fmt.Sprintf(", which its containers %s ask for together, on one card", c.asks)
	case c.largest.init && c.largest.amount == c.Request:
		request += fmt.Sprintf(", which its init container %s asks for", c.largest.container)
	}
	return fmt.Sprintf("no card is large enough for %s: %s", request, c.room.message)
}

// certainlyBytes is a request in units that must have been meant in bytes: no card has as many units.
const certainlyBytes = 100_000_000

// quantityMistake returns the request and what to write instead, if the largest request of a container was meant in bytes: "2Gi"
// is 2147483648 units. The API server stores the suffixes Ki, Mi, Gi and so on as they were written, except that it chooses the
// largest that leaves a whole number.
func (c *podCase) quantityMistake() (text string, found bool) {
	unit, amount, suffix := c.room.unit, c.largest.amount, ""
	for _, s := range []string{"Ki", "Mi", "Gi", "Ti", "Pi", "Ei"} {
		if strings.HasSuffix(c.largest.written, s) {
			suffix = s
		}
	}
	units := fmt.Sprintf("%s units of 1 %s", c.Request, unit)
	if unit != gpu.MiB && unit != gpu.GiB {
		units = fmt.Sprintf("%s units of %s", c.Request, unit)
	}
	where := ""
	if amount != c.Request {
		where = " in container " + c.largest.container
	}
	meant := (amount-1)/gpu.Memory(max(unit, 1)) + 1 // Rounded up, as bytes.
	switch {
	case suffix == "Ki":
		return fmt.Sprintf("%s (write the number of units%s, without Ki)", units, where), true
	case suffix != "":
		return fmt.Sprintf("%s (write %s%s, without %s)", units, meant, where, suffix), true
	case amount >= certainlyBytes, amount > 0 && amount%(1<<20) == 0:
		return fmt.Sprintf("%s (write %s%s, if bytes were meant)", units, meant, where), true
	}
	return "", false
}

// room explains the reason by the best node.
func (s *summary) room(now time.Time, excluded string) room {
	f, name, amount := s.best, s.best.node.Object.Name, s.best.node.Unit.Format
	free, piece := f.totals.FreeHealthy, f.totals.MostFree
	has := fmt.Sprintf("%s has room for it, %s on one card", name, amount(piece))
	made := room{reason: s.reason}
	if text := s.containersText(); text != "" {
		made.message = text + excluded
		return made
	}
	if !f.demand.MemoryOnly() {
		has = fmt.Sprintf("%s has room for it, %s", name, f.roomText(f.roomy))
		if text := s.severalText(); text != "" {
			made.message = text + excluded
			return made
		}
	}
	switch s.reason {
	case reasons.Fits:
		made.has = has
	case reasons.KeptForNominated:
		made.message = fmt.Sprintf("%s, but keeps it for %s, which is nominated to that node", has, f.nominee)
	case reasons.FailedCard:
		made.message = fmt.Sprintf("%s, but kube-scheduler counts the node's sum: %s and no longer counts, but the pods on it do until they end",
			has, f.failed)
	case reasons.WaitsForTermination:
		made.message = f.waitsText(now)
	case reasons.Crowded:
		made.message = fmt.Sprintf("the cards that have room, on %s, take no more containers by MPS", name)
	case reasons.Fragmented:
		made.message = fmt.Sprintf("%s free on %s, but the largest piece is %s: a pod gets one card", amount(free), name, amount(piece))
	case reasons.Full:
		made.message = fmt.Sprintf("the cards that are large enough are taken: the largest free piece is %s, on %s", amount(piece), name)
		if piece == 0 {
			made.message = "the cards that are large enough are taken, nothing of them is free"
		}
	case reasons.Unhealthy:
		made.message = fmt.Sprintf("the cards that are large enough are unhealthy, on %s", name)
		if s.n > 1 {
			made.message += fmt.Sprintf(" and %s", count(s.n-1, "other node", "other nodes"))
		}
	case reasons.TooLarge:
		f = s.largest
		made.unit = f.node.Unit
		made.message = fmt.Sprintf("the largest has %s, on %s", made.unit.Format(f.totals.Largest), f.node.Object.Name)
	}
	made.message += excluded
	return made
}

// containersText explains why the pod is too large if its number of containers is the reason.
func (s *summary) containersText() string {
	if s.reason != reasons.TooLarge {
		return ""
	}
	most, containers := int32(0), s.largest.demand.Containers
	for i := range s.largest.node.Cards {
		if empty := s.largest.node.Cards[i].Empty(); empty.Memory >= s.largest.demand.Memory && empty.FreeContainers() < containers {
			most = max(most, empty.FreeContainers())
		}
	}
	if most == 0 {
		return ""
	}
	return fmt.Sprintf("the pod has %d containers with GPU memory, and a card takes %d by MPS, on %s", containers, most, s.largest.node.Object.Name)
}

// severalText explains the reason for a pod that asks for more than memory of one card, if the reason needs words of its own.
func (s *summary) severalText() string {
	f, name := &s.best, s.best.node.Object.Name
	needs, has := f.needsText(), "none"
	if f.roomy > 0 {
		has = strconv.Itoa(f.roomy)
	}
	switch s.reason {
	case reasons.Fragmented:
		return fmt.Sprintf("%s: %s has %s, though enough in sum", needs, name, has)
	case reasons.Full:
		return fmt.Sprintf("%s: %s has %s", needs, name, has)
	case reasons.Unhealthy:
		return fmt.Sprintf("%s: too few of the cards that are large enough are healthy, on %s", needs, name)
	case reasons.TooLarge:
		return fmt.Sprintf("%s: no node has as many cards that are large enough; %s has %d", needs, s.largest.node.Object.Name, s.largest.large)
	}
	return ""
}

// needsText describes the cards that the pod needs, such as "2 cards with 4 GiB free each are needed on one node".
func (f *finding) needsText() string {
	share, n := f.node.Unit.Format(f.demand.Memory), f.demand.Cards
	if f.demand.Cores > 0 && n == 1 {
		share += fmt.Sprintf(" and %d%% of its computing", f.demand.Cores)
	} else if f.demand.Cores > 0 {
		share += fmt.Sprintf(" and %d%% of their computing", f.demand.Cores)
	}
	near := ""
	if f.demand.RDMA == gpu.RDMARequired {
		near = " near an RDMA adapter"
	}
	if n == 1 {
		return fmt.Sprintf("a card%s with %s free is needed", near, share)
	}
	return fmt.Sprintf("%d cards%s with %s free each are needed on one node", n, near, share)
}

// roomText describes cards with room for the pod's share.
func (f *finding) roomText(n int) string {
	share := f.node.Unit.Format(f.demand.Memory)
	if f.demand.Cores > 0 {
		share += fmt.Sprintf(" and %d%% of the computing", f.demand.Cores)
	}
	return fmt.Sprintf("%s on %s", share, count(n, "card", "cards"))
}

// waitsText names the pods that must end first.
func (f *finding) waitsText(now time.Time) string {
	last := &f.waitsFor[0]
	text := fmt.Sprintf("%s has room for it once %s", f.node.Object.Name, last)
	if others := len(f.waitsFor) - 1; others > 0 {
		text += fmt.Sprintf(" (and %d more)", others)
	}
	text += " has ended"
	if !last.Since.IsZero() {
		text += ", terminating since " + last.Since.UTC().Format(time.RFC3339)
	}
	if !last.Due.IsZero() && last.Overdue(now) {
		text += "; it should have ended by " + last.Due.UTC().Format(time.RFC3339) + ": its node or driver may hang"
	}
	return text
}

// text lists the nodes by reason, the most frequent one first. c are the pod's constraints.
func (e exclusions) text(c *eligibility.Constraints) string {
	type reason struct {
		*excludedNodes
		text string
	}
	var reasons []reason
	for why, excluded := range e {
		reasons = append(reasons, reason{excluded, exclusionText(why, c)})
	}
	slices.SortFunc(reasons, func(a, b reason) int { return cmp.Or(cmp.Compare(b.n, a.n), strings.Compare(a.text, b.text)) })
	var out strings.Builder
	for _, reason := range reasons {
		fmt.Fprintf(&out, "; %s: %s", listed(reason.names, reason.n), reason.text)
	}
	return out.String()
}

// exclusionText returns why a pod with the constraints can't use a node in words.
func exclusionText(why eligibility.Exclusion, c *eligibility.Constraints) string {
	switch {
	case why.ByConstraints:
		return excludedBy(c)
	case why.Reason != "":
		return why.Reason
	}
	taint := corev1.Taint{Key: why.Key, Value: why.Value, Effect: why.Effect}
	return "the pod doesn't tolerate the taint " + taint.ToString()
}

// excludedBy returns by which of the constraints a node is excluded that the affinity doesn't match.
func excludedBy(c *eligibility.Constraints) string {
	selector := c.NodeSelector
	var shown []string
	for _, key := range slices.Sorted(maps.Keys(selector)) {
		shown = append(shown, key+"="+selector[key])
		if len(shown) == maxNames {
			break
		}
	}
	text := listed([]string{strings.Join(shown, ",")}, 1+len(selector)-len(shown))
	switch {
	case len(selector) > 0 && c.Affinity != nil:
		return fmt.Sprintf("excluded by the pod's node selector (%s) or its node affinity", text)
	case c.Affinity != nil:
		return "excluded by the pod's node affinity"
	default:
		return fmt.Sprintf("excluded by the pod's node selector (%s)", text)
	}
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

// maxNames is how many names a message has in a row, such as the names of the nodes for one reason.
const maxNames = 3

// Excerpt returns a text of kube-scheduler in one line of at most 300 characters.
func Excerpt(text string) string {
	const limit = 300
	text = strings.Join(strings.Fields(text), " ")
	if utf8.RuneCountInString(text) <= limit {
		return text
	}
	return strings.TrimSpace(string([]rune(text)[:limit-1])) + "…"
}

// FirstOf returns the first of the names, and the number of others.
func FirstOf(names []string) string { return listed(names[:min(len(names), maxNames)], len(names)) }

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

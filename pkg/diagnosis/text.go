package diagnosis

import (
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/duration"

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
	return fmt.Sprintf("scheduler %q has not tried it for %s", c.Scheduler, duration.ShortHumanDuration(c.untried))
}

func (c *podCase) failedCallText() string {
	verb, why, _ := reasons.FailedCall(c.Message)
	if strings.HasPrefix(why, "HTTP status 4") {
		return fmt.Sprintf("kube-scheduler's %s call of the extender fails: %s: check urlPrefix in kube-scheduler's configuration and the extender's "+
			"--client-names", verb, why)
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

// room explains the best finding for the pod.
func (f *finding) room(pod *Pod, now time.Time) room {
	n, name, amount := f.node, f.node.Object.Name, f.node.Unit.Format
	made := room{reason: f.reason, has: name + " has room for it"}
	switch f.reason {
	case reasons.Fits:
	case reasons.KeptForNominated:
		nominee, _ := n.keptFor(pod, n.Cards)
		made.message = fmt.Sprintf("%s, but keeps it for %s, which is nominated to that node", made.has, nominee)
	case reasons.FailedCard:
		made.message = made.has + ", but kube-scheduler counts the node's sum, in which pods on failed or missing cards count until they end"
	case reasons.WaitsForTermination:
		made.message = made.has + n.waitsText(now)
	case reasons.Crowded:
		made.message = fmt.Sprintf("the cards that have room, on %s, take no more containers by MPS", name)
	case reasons.Unhealthy:
		made.message = fmt.Sprintf("too few of the cards that are large enough are healthy, on %s", name)
	case reasons.TooLarge:
		made.message = fmt.Sprintf("no node is large enough for %s: the largest card has %s, on %s", needs(pod, n.Unit), amount(n.totals.Largest), name)
		if most := n.Cards[0].MaxContainers; most > 0 {
			made.message += fmt.Sprintf(", and takes %d containers by MPS", most)
		}
	default:
		made.message = fmt.Sprintf("no node has room for %s: %s has %s free in all, at most %s on one card", needs(pod, n.Unit), name,
			amount(n.totals.FreeHealthy), amount(n.totals.MostFree))
	}
	return made
}

// needs describes what the pod needs of cards, such as "4 GiB on each of 2 cards".
func needs(pod *Pod, unit gpu.Unit) string {
	demand := pod.Demand()
	text := unit.Format(demand.Memory)
	if demand.Cores > 0 {
		text += fmt.Sprintf(" and %d%% of the computing", demand.Cores)
	}
	if demand.Cards == 1 {
		text += " on one card"
	} else {
		text += fmt.Sprintf(" on each of %d cards", demand.Cards)
	}
	if demand.RDMA == gpu.RDMARequired {
		text += " near an RDMA adapter"
	}
	return text
}

// waitsText names the last pod that must end first.
func (n *Node) waitsText(now time.Time) string {
	last := slices.MaxFunc(n.Terminating, func(a, b Terminating) int { return a.Due.Compare(b.Due) })
	text := fmt.Sprintf(" once %s has ended", last)
	if !last.Since.IsZero() {
		text += ", terminating since " + last.Since.UTC().Format(time.RFC3339)
	}
	if !last.Due.IsZero() && last.Overdue(now) {
		text += "; it should have ended by " + last.Due.UTC().Format(time.RFC3339) + ": its node or driver may hang"
	}
	return text
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
func FirstOf(names []string) string {
	text := strings.Join(names[:min(len(names), maxNames)], ", ")
	if others := len(names) - maxNames; others > 0 {
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

package diagnosis

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// choice is what the nodes are to a pod's constraints, independent of memory.
type choice struct {
	// nodes are the positions of those that the pod can use, with the most free memory first, and of equal ones by name.
	nodes []int
	// runs holds for each of the nodes how many from there on are the same, see figures.same.
	runs []int
	// rejected is why it can't use the others; empty if it can use all.
	rejected string
}

// rejections are the nodes that a pod can't use, by reason.
type rejections map[eligibility.Exclusion]*rejectedNodes

// rejectedNodes are the nodes that a pod can't use for one reason.
type rejectedNodes struct {
	why eligibility.Exclusion
	// names are the first three, n is the number of all.
	names []string
	n     int
}

// maxNames is how many names a message has in a row, such as the names of the nodes for one reason.
const maxNames = 3

func (r rejections) add(why eligibility.Exclusion, name string) {
	if r[why] == nil {
		r[why] = &rejectedNodes{why: why}
	}
	r[why].n++
	if r[why].n <= maxNames {
		r[why].names = append(r[why].names, name)
	}
}

// addOthers adds the nodes that are no candidates, whose positions are in order. It reads a few of them only.
func (r rejections) addOthers(nodes []Node, candidates []int) {
	why := eligibility.Exclusion{ByConstraints: true}
	others, named := len(nodes)-len(candidates), 0
	for i := 0; named < min(others, maxNames); i++ {
		if _, candidate := slices.BinarySearch(candidates, i); !candidate {
			r.add(why, nodes[i].Object.Name)
			named++
		}
	}
	if others > named {
		r[why].n += others - named
	}
}

// text lists the nodes by reason, the most frequent one first. c are the pod's constraints.
func (r rejections) text(c *eligibility.Constraints) string {
	type reason struct {
		*rejectedNodes
		text string
	}
	var reasons []reason
	for why, rejected := range r {
		reasons = append(reasons, reason{rejected, exclusionText(why, c)})
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

// maxChosen limits the nodes in the choices that are kept: thousands of pods with constraints of their own can each use thousands of nodes.
const maxChosen = 1 << 20

// choice returns the nodes that the pod can use.
func (d *Diagnoser) choice(pod *Pod) *choice {
	if known := d.choices[pod.Constraints]; known != nil {
		return known
	}
	if d.chosen >= maxChosen {
		clear(d.choices)
		d.chosen = 0
	}
	made, rejected := &choice{}, rejections{}
	d.choices[pod.Constraints] = made
	c := eligibility.Parse(pod.Constraints)
	if c == nil {
		return made
	}
	candidates := d.nodes.Candidates(c)
	for _, i := range candidates {
		node := &d.nodes.nodes[i]
		if why := node.Exclusion(c); why != (eligibility.Exclusion{}) {
			rejected.add(why, node.Object.Name)
		} else {
			made.nodes = append(made.nodes, i)
		}
	}
	pinned := c.PinnedTo()
	if len(pinned) == 0 {
		rejected.addOthers(d.nodes.nodes, candidates)
	}
	made.rejected = rejected.text(c)
	switch {
	case len(pinned) == 0 || len(candidates) == len(d.nodes.nodes):
	case len(candidates) > 0:
		made.rejected += fmt.Sprintf("; the pod's node affinity names %s only, as for each pod of a DaemonSet", firstOf(pinned))
	default:
		made.rejected = fmt.Sprintf(": its node affinity names %s, which shares none", firstOf(pinned))
	}
	made.order(d.nodes.figures)
	d.chosen += len(made.nodes)
	return made
}

// order sorts the nodes and counts their runs.
func (c *choice) order(of []figures) {
	slices.SortFunc(c.nodes, func(a, b int) int { return cmp.Or(of[b].compare(&of[a]), cmp.Compare(a, b)) })
	c.runs = slices.Repeat([]int{1}, len(c.nodes))
	for k := len(c.nodes) - 2; k >= 0; k-- {
		if of[c.nodes[k]].same(&of[c.nodes[k+1]]) {
			c.runs[k] += c.runs[k+1]
		}
	}
}

// verdict is what the nodes and their cards have for a pod. reason is one of cardReasons or NoNode.
type verdict struct {
	reason  reasons.Reason
	message string
	// has is, for Fits, the part of the message that names the node that has room.
	has string
	// unit is, for TooLarge, the unit of the node with the largest card.
	unit gpu.Unit
}

// cardReasons are the reasons that depend on a node's cards, the best one first: the pod's reason is the best one of any node.
var cardReasons = []reasons.Reason{
	reasons.Fits, reasons.KeptForNominated, reasons.FailedCard, reasons.WaitsForTermination, reasons.Crowded, reasons.Fragmented, reasons.Full,
	reasons.Unhealthy, reasons.TooLarge,
}

// verdict returns what the nodes have for the pod.
func (d *Diagnoser) verdict(pod *Pod) verdict {
	if d.podsOnly {
		return reportedVerdict(pod)
	}
	key := verdictKey{pod.Demand(), pod.Priority, pod.Constraints, ""}
	if pod.NominatedNode != "" { // No room is kept from the pod for itself.
		key.nominee = pod.UID
	}
	made, known := d.verdicts[key]
	if !known {
		made = d.findVerdict(pod)
		d.verdicts[key] = made
	}
	return made
}

// verdictKey is equal for pods for which the same nodes have room.
type verdictKey struct {
	demand      gpu.Demand
	priority    int32
	constraints unique.Handle[string]
	// nominee is the pod if it is nominated to a node.
	nominee gpu.PodUID
}

func (d *Diagnoser) findVerdict(pod *Pod) verdict {
	if len(d.nodes.nodes) == 0 {
		return verdict{reason: reasons.NoNode, message: "no node shares GPU memory"}
	}
	choice := d.choice(pod)
	if len(choice.nodes) == 0 {
		return verdict{reason: reasons.NoNode, message: "no node that shares GPU memory can take the pod" + choice.rejected}
	}
	var sums summaries
	f := finding{demand: pod.Demand()}
	for k, n := 0, 0; k < len(choice.nodes); k += n {
		i := choice.nodes[k]
		n = 1
		if !f.several() {
			if fits := sums.of(reasons.Fits); fits != nil && d.nodes.figures[i].compare(fits.best.figures) < 0 {
				break // All further nodes have less than the best one.
			}
			n = choice.runs[k]
		}
		d.find(&f, i, pod)
		sums.add(&f, n)
	}
	for _, reason := range cardReasons {
		if s := sums.of(reason); s != nil {
			return s.verdict(d.now, choice.rejected)
		}
	}
	panic("unreachable: each node has one of these reasons")
}

// finding is what one node has for a pod.
type finding struct {
	node *Node
	// position is the node's position.
	position int
	*figures
	demand gpu.Demand
	// roomy is the number of cards with room for the demand, and large of those that would have room if they were empty. They are
	// counted only if the pod asks for more than memory of one card, see several.
	roomy, large int
	reason       reasons.Reason
	// nominee is the pod for which the node keeps its room; failed is what happened to a card; waitsFor are the pods on
	// the card that has room once they have ended. Each is only valid for its reason.
	nominee  gpu.Pod
	failed   string
	waitsFor []Terminating
}

// find sets what a node has for the pod, which can use it. The demand is set already. It runs for thousands of nodes per pod.
func (d *Diagnoser) find(f *finding, i int, pod *Pod) {
	f.node, f.position, f.figures = &d.nodes.nodes[i], i, &d.nodes.figures[i]
	f.count()
	switch reason := f.totals.Fit(f.node.Cards, &f.demand); reason {
	case reasons.Fits:
		f.reason = reasons.Fits
		if card, failed := f.failedCard(pod.Request); failed {
			f.reason, f.failed = reasons.FailedCard, card
		} else if nominee, kept := f.node.keptFor(pod, f.node.Cards); kept {
			f.reason, f.nominee = reasons.KeptForNominated, nominee
		}
	case reasons.Fragmented, reasons.Full, reasons.Crowded:
		f.reason = reason
		f.afterTermination(pod)
	case reasons.Unhealthy:
		f.reason = reason
	default:
		f.reason = reasons.TooLarge
	}
}

// several reports whether the pod asks for more than memory of one card, whichever it is.
func (f *finding) several() bool {
	return !f.demand.MemoryOnly()
}

func (f *finding) count() {
	if !f.several() {
		return
	}
	f.roomy, f.large = 0, 0
	one := f.demand
	one.Cards = 1
	for i := range f.node.Cards {
		switch placement.Fit(f.node.Cards[i:i+1], one) {
		case reasons.Fits:
			f.roomy, f.large = f.roomy+1, f.large+1
		case reasons.TooLarge:
		default:
			f.large++
		}
	}
}

// failedCard returns what has happened to a card, if because of it kube-scheduler finds too little memory on the node in sum: a
// card that has failed or is gone is no longer part of the node's allocatable memory, and its pods still count. Of several
// cards it is the one with the most used memory.
func (f *finding) failedCard(request gpu.Memory) (what string, failed bool) {
	if request <= f.spare {
		return "", false
	}
	var most, onCards gpu.Memory
	for i := range f.node.Cards {
		card := &f.node.Cards[i]
		onCards = onCards.Add(card.Used)
		if card.Unhealthy && card.Used > most {
			what, most = fmt.Sprintf("GPU%d has failed", card.Index), card.Used
		}
	}
	if most == 0 && f.node.Requested > onCards {
		return "a card is gone", true
	}
	return what, most > 0
}

// keptFor counts the nominated pods of equal or higher priority one by one, and returns the first after which the pod no longer
// fits the cards. They come first, see ledger.Nominate.
func (n *Node) keptFor(pod *Pod, cards []placement.Card) (nominee gpu.Pod, kept bool) {
	for i := range n.Nominees {
		candidate := &n.Nominees[i]
		if candidate.Pod.Priority < pod.Priority || candidate.Pod.UID == pod.UID {
			continue
		}
		cards = withUsed(cards, candidate.On, (*placement.Card).Add)
		if placement.Fit(cards, pod.Demand()) != reasons.Fits {
			return candidate.Pod, true
		}
	}
	return gpu.Pod{}, false
}

// afterTermination sets the reason WaitsForTermination if a card has room once the pods that are terminating on it have ended,
// and no nominated pod takes it.
func (f *finding) afterTermination(pod *Pod) {
	if f.after == nil || f.after.totals.Fit(f.after.cards, &f.demand) != reasons.Fits {
		return
	}
	where, _ := placement.Place(placement.Spread, f.after.cards, f.demand)
	if _, kept := f.node.keptFor(pod, f.after.cards); kept {
		return
	}
	f.reason, f.waitsFor = reasons.WaitsForTermination, nil
	for _, terminating := range f.node.Terminating {
		if slices.ContainsFunc(terminating.Placement, func(s gpu.Share) bool { return slices.Contains(where.Cards(), s.Card) }) {
			f.waitsFor = append(f.waitsFor, terminating)
		}
	}
	slices.SortStableFunc(f.waitsFor, func(a, b Terminating) int { return b.Due.Compare(a.Due) }) // The last one to end.
}

// withUsed returns a copy of the cards on which what is used is changed by the placement.
func withUsed(cards []placement.Card, where gpu.Placement, change func(*placement.Card, gpu.Share)) []placement.Card {
	cards = slices.Clone(cards)
	for i := range cards {
		for _, share := range where {
			if share.Card == cards[i].Index {
				change(&cards[i], share)
			}
		}
	}
	return cards
}

// bytes converts an amount to bytes, to compare amounts of nodes with different units. It saturates.
func (n *Node) bytes(m gpu.Memory) gpu.Memory {
	if unit := gpu.Memory(n.Unit); unit > 0 && m > math.MaxInt64/unit {
		return math.MaxInt64
	}
	return m * gpu.Memory(n.Unit)
}

// compare compares what two nodes have free: first the number of cards with room, then their figures.
func (f *finding) compare(o *finding) int {
	return cmp.Or(cmp.Compare(f.roomy, o.roomy), f.figures.compare(o.figures))
}

// compareSize compares the sizes of two nodes' cards, and prefers the first of equal ones.
func (f *finding) compareSize(o *finding) int {
	return cmp.Or(cmp.Compare(f.large, o.large), cmp.Compare(f.largest, o.largest), cmp.Compare(o.position, f.position))
}

// summary is the nodes with the same reason: the one with the most free memory, and of equal ones the first.
type summary struct {
	reason reasons.Reason
	best   finding
	// n is the number of nodes; alike have the same figures as best, and the others less.
	n, alike int
	// largest is the node with the largest card.
	largest finding
}

// summaries has one summary for each reason that was found. They are few.
type summaries []summary

// of returns the summary of the reason; nil if there is none.
func (s summaries) of(reason reasons.Reason) *summary {
	for i := range s {
		if s[i].reason == reason {
			return &s[i]
		}
	}
	return nil
}

// add counts n nodes for which the same was found, of which f is the first. Nodes with the same figures must come in their order.
func (s *summaries) add(f *finding, n int) {
	known := s.of(f.reason)
	if known == nil {
		*s = append(*s, summary{reason: f.reason, best: *f, n: n, alike: n - 1, largest: *f})
		return
	}
	known.n += n
	switch order := f.compare(&known.best); {
	case order > 0:
		known.best, known.alike = *f, n-1
	case order == 0:
		known.alike += n
	}
	if f.compareSize(&known.largest) > 0 {
		known.largest = *f
	}
}

// others returns the note on the nodes besides the one that is named.
func (s *summary) others() string {
	switch less := s.n - 1 - s.alike; {
	case s.alike > 0:
		return fmt.Sprintf(" (and %s alike)", count(s.alike, "node", "nodes"))
	case less > 0:
		return fmt.Sprintf(" (%s less)", count(less, "other node has", "other nodes have"))
	}
	return ""
}

// verdict explains the reason by the best node.
func (s *summary) verdict(now time.Time, rejected string) verdict {
	f, name, amount := s.best, s.best.node.Object.Name, s.best.node.Unit.Format
	free, piece := f.totals.FreeHealthy, f.totals.MostFree
	has := fmt.Sprintf("%s has room for it, %s on one card", name, amount(piece))
	made := verdict{reason: s.reason}
	if text := s.containersText(); text != "" {
		made.message = text + rejected
		return made
	}
	if f.several() {
		has = fmt.Sprintf("%s has room for it, %s", name, f.roomText(f.roomy))
		if text := s.severalText(); text != "" {
			made.message = text + rejected
			return made
		}
	}
	switch s.reason {
	case reasons.Fits:
		made.has = has
		if s.alike > 0 {
			made.has += s.others()
		}
	case reasons.KeptForNominated:
		made.message = fmt.Sprintf("%s, but keeps it for %s, which is nominated to that node", has, f.nominee)
	case reasons.FailedCard:
		made.message = fmt.Sprintf("%s, but kube-scheduler counts the node's sum: %s and no longer counts, but the pods on it do until they end",
			has, f.failed)
	case reasons.WaitsForTermination:
		made.message = f.waitsText(now)
	case reasons.Crowded:
		made.message = fmt.Sprintf("the cards that have room, on %s%s, take no more containers by MPS", name, s.others())
	case reasons.Fragmented:
		made.message = fmt.Sprintf("%s free on %s, but the largest piece is %s%s: a pod gets one card", amount(free), name, amount(piece), s.others())
	case reasons.Full:
		made.message = fmt.Sprintf("the cards that are large enough are taken: the largest free piece is %s, on %s%s", amount(piece), name, s.others())
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
	made.message += rejected
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
		return fmt.Sprintf("%s: %s has %s, though enough in sum%s", needs, name, has, s.others())
	case reasons.Full:
		return fmt.Sprintf("%s: %s has %s%s", needs, name, has, s.others())
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

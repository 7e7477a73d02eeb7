package diagnosis

import (
	"cmp"
	"fmt"
	"slices"
	"unique"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// eligibleNodes are what a pod's constraints leave of the nodes, independent of memory.
type eligibleNodes struct {
	// nodes are the positions of those that the pod can use, in order.
	nodes []int
	// excluded is why it can't use the others; empty if it can use all.
	excluded string
}

// exclusions are the nodes that a pod can't use, by reason.
type exclusions map[eligibility.Exclusion]*excludedNodes

// excludedNodes are the nodes that a pod can't use for one reason.
type excludedNodes struct {
	// names are the first three, n is the number of all.
	names []string
	n     int
}

func (e exclusions) add(why eligibility.Exclusion, name string) {
	if e[why] == nil {
		e[why] = &excludedNodes{}
	}
	e[why].n++
	if e[why].n <= maxNames {
		e[why].names = append(e[why].names, name)
	}
}

// addOthers adds the nodes that are no candidates, whose positions are in order. It reads a few of them only.
func (e exclusions) addOthers(nodes []Node, candidates []int) {
	why := eligibility.Exclusion{ByConstraints: true}
	others, named := len(nodes)-len(candidates), 0
	for i := 0; named < min(others, maxNames); i++ {
		if _, candidate := slices.BinarySearch(candidates, i); !candidate {
			e.add(why, nodes[i].Object.Name)
			named++
		}
	}
	if others > named {
		e[why].n += others - named
	}
}

// maxEligible limits the nodes in Diagnoser.eligible: thousands of pods with constraints of their own can each use thousands of nodes.
const maxEligible = 1 << 20

// eligibleFor returns the nodes that the pod can use.
func (d *Diagnoser) eligibleFor(pod *Pod) *eligibleNodes {
	if known := d.eligible[pod.Constraints]; known != nil {
		return known
	}
	if d.eligibleKept >= maxEligible {
		clear(d.eligible)
		d.eligibleKept = 0
	}
	made, excluded := &eligibleNodes{}, exclusions{}
	d.eligible[pod.Constraints] = made
	c := eligibility.Parse(pod.Constraints)
	if c == nil {
		return made
	}
	candidates := d.nodes.Candidates(c)
	for _, i := range candidates {
		node := &d.nodes.nodes[i]
		if why := node.Exclusion(c); why != (eligibility.Exclusion{}) {
			excluded.add(why, node.Object.Name)
		} else {
			made.nodes = append(made.nodes, i)
		}
	}
	pinned := c.PinnedTo()
	if len(pinned) == 0 {
		excluded.addOthers(d.nodes.nodes, candidates)
	}
	made.excluded = excluded.text(c)
	switch {
	case len(pinned) == 0 || len(candidates) == len(d.nodes.nodes):
	case len(candidates) > 0:
		made.excluded += fmt.Sprintf("; the pod's node affinity names %s only, as for each pod of a DaemonSet", FirstOf(pinned))
	default:
		made.excluded = fmt.Sprintf(": its node affinity names %s, which shares none", FirstOf(pinned))
	}
	d.eligibleKept += len(made.nodes)
	return made
}

// room is what the nodes and their cards have for a pod. reason is one of cardReasons or NoNode.
type room struct {
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

// roomFor returns what the nodes have for the pod.
func (d *Diagnoser) roomFor(pod *Pod) room {
	if d.podsOnly {
		return reportedRoom(pod)
	}
	key := roomKey{pod.Demand(), pod.Priority, pod.Constraints, ""}
	if pod.NominatedNode != "" { // No room is kept from the pod for itself.
		key.nominee = pod.UID
	}
	made, known := d.rooms[key]
	if !known {
		made = d.findRoom(pod)
		d.rooms[key] = made
	}
	return made
}

// roomKey is equal for pods for which the same nodes have room.
type roomKey struct {
	demand      gpu.Demand
	priority    int32
	constraints unique.Handle[string]
	// nominee is the pod if it is nominated to a node.
	nominee gpu.PodUID
}

func (d *Diagnoser) findRoom(pod *Pod) room {
	if len(d.nodes.nodes) == 0 {
		return room{reason: reasons.NoNode, message: "no node shares GPU memory"}
	}
	eligible := d.eligibleFor(pod)
	if len(eligible.nodes) == 0 {
		return room{reason: reasons.NoNode, message: "no node that shares GPU memory can take the pod" + eligible.excluded}
	}
	sums := map[reasons.Reason]*summary{}
	f := finding{demand: pod.Demand()}
	for _, i := range eligible.nodes {
		d.find(&f, i, pod)
		if sums[f.reason] == nil {
			sums[f.reason] = &summary{reason: f.reason}
		}
		sums[f.reason].add(&f)
	}
	for _, reason := range cardReasons {
		if s := sums[reason]; s != nil {
			return s.room(d.now, eligible.excluded)
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
	// counted only if the pod asks for more than memory of one card.
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
	switch reason := placement.Fit(f.node.Cards, f.demand); reason {
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

func (f *finding) count() {
	if f.demand.MemoryOnly() {
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
	if f.after == nil || placement.Fit(f.after, f.demand) != reasons.Fits {
		return
	}
	where, _ := placement.Place(placement.Spread, f.after, f.demand)
	if _, kept := f.node.keptFor(pod, f.after); kept {
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

// bytes returns an amount of the node in bytes, to compare nodes with different units.
func (f *finding) bytes(memory gpu.Memory) uint64 { return f.node.Unit.Bytes(memory) }

// compare compares what two nodes have free: first the number of cards with room, then the largest piece, then the sum.
func (f *finding) compare(o *finding) int {
	return cmp.Or(cmp.Compare(f.roomy, o.roomy), cmp.Compare(f.bytes(f.totals.MostFree), o.bytes(o.totals.MostFree)),
		cmp.Compare(f.bytes(f.totals.FreeHealthy), o.bytes(o.totals.FreeHealthy)))
}

// compareSize compares the sizes of two nodes' cards, and prefers the first of equal ones.
func (f *finding) compareSize(o *finding) int {
	return cmp.Or(cmp.Compare(f.large, o.large), cmp.Compare(f.bytes(f.totals.Largest), o.bytes(o.totals.Largest)), cmp.Compare(o.position, f.position))
}

// summary is the nodes with the same reason: the one with the most free memory, and of equal ones the first.
type summary struct {
	reason reasons.Reason
	best   finding
	// n is the number of nodes.
	n int
	// largest is the node with the largest card.
	largest finding
}

// add counts a node. Nodes must come in order.
func (s *summary) add(f *finding) {
	if s.n == 0 || f.compare(&s.best) > 0 {
		s.best = *f
	}
	if s.n == 0 || f.compareSize(&s.largest) > 0 {
		s.largest = *f
	}
	s.n++
}

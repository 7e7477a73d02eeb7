package diagnosis

import (
	"cmp"
	"maps"
	"slices"
	"strings"
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
	// excluded is why it can't use the others, to be appended to a message; empty if it can use all.
	excluded string
}

// maxEligible limits Diagnoser.eligible: thousands of pods with constraints of their own can each use thousands of nodes.
const maxEligible = 256

// eligibleFor returns the nodes that pods with the constraints can use.
func (d *Diagnoser) eligibleFor(constraints unique.Handle[string]) *eligibleNodes {
	if known := d.eligible[constraints]; known != nil {
		return known
	}
	if len(d.eligible) >= maxEligible {
		clear(d.eligible)
	}
	made := &eligibleNodes{}
	d.eligible[constraints] = made
	c := eligibility.Parse(constraints)
	if c == nil {
		return made
	}
	byConstraints, others := len(d.nodes), map[string][]string{}
	for _, i := range d.index.Candidates(c) {
		switch why := d.nodes[i].Exclusion(c); why {
		case eligibility.ByConstraints:
			continue
		case "":
			made.nodes = append(made.nodes, i)
		default:
			others[why] = append(others[why], d.nodes[i].Object.Name)
		}
		byConstraints--
	}
	if byConstraints > 0 {
		made.excluded = "; " + count(byConstraints, "node is ", "nodes are ") + eligibility.ByConstraints
	}
	byNumber := func(a, b string) int {
		return cmp.Or(cmp.Compare(len(others[b]), len(others[a])), strings.Compare(a, b))
	}
	for _, why := range slices.SortedFunc(maps.Keys(others), byNumber) {
		made.excluded += "; " + FirstOf(others[why]) + ": " + why
	}
	return made
}

// room is what the nodes and their cards have for a pod. reason is one of cardReasons or NoNode.
type room struct {
	reason  reasons.Reason
	message string
	// has is, for Fits, the part of the message that names the node that has room.
	has string
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
	if len(d.nodes) == 0 {
		return room{reason: reasons.NoNode, message: "no node shares GPU memory"}
	}
	eligible := d.eligibleFor(pod.Constraints)
	if len(eligible.nodes) == 0 {
		return room{reason: reasons.NoNode, message: "no node that shares GPU memory can take the pod" + eligible.excluded}
	}
	var best finding
	demand := pod.Demand()
	for _, i := range eligible.nodes {
		n := &d.nodes[i]
		if found := (finding{n, n.reasonFor(pod, &demand)}); best.node == nil || found.compare(&best) < 0 {
			best = found
		}
	}
	made := best.room(pod, d.now)
	made.message += eligible.excluded
	return made
}

// finding is what one node has for a pod.
type finding struct {
	node   *Node
	reason reasons.Reason
}

// compare orders the findings for a pod: first the best reason, then the largest free piece, or the largest card if the pod is too large.
func (f *finding) compare(o *finding) int {
	if f.reason != o.reason {
		return cmp.Compare(slices.Index(cardReasons, f.reason), slices.Index(cardReasons, o.reason))
	}
	bytes := func(f *finding, memory gpu.Memory) uint64 { return f.node.Unit.Bytes(memory) } // Units can differ.
	a, b := &f.node.totals, &o.node.totals
	if f.reason == reasons.TooLarge {
		return cmp.Compare(bytes(o, b.Largest), bytes(f, a.Largest))
	}
	return cmp.Or(cmp.Compare(bytes(o, b.MostFree), bytes(f, a.MostFree)), cmp.Compare(bytes(o, b.FreeHealthy), bytes(f, a.FreeHealthy)))
}

// reasonFor returns what the node has for the pod, which can use it. It runs for thousands of nodes per pod.
func (n *Node) reasonFor(pod *Pod, demand *gpu.Demand) reasons.Reason {
	switch reason := placement.Fit(n.Cards, *demand); reason {
	case reasons.Fits:
		if pod.Request > n.spare { // A card that has failed or is gone is no part of the node's allocatable memory, and its pods still count.
			return reasons.FailedCard
		}
		if _, kept := n.keptFor(pod, n.Cards); kept {
			return reasons.KeptForNominated
		}
		return reason
	case reasons.Fragmented, reasons.Full, reasons.Crowded:
		if n.after != nil && placement.Fit(n.after, *demand) == reasons.Fits {
			if _, kept := n.keptFor(pod, n.after); !kept {
				return reasons.WaitsForTermination
			}
		}
		return reason
	case reasons.Unhealthy:
		return reason
	}
	return reasons.TooLarge
}

// keptFor counts the nominated pods of equal or higher priority one by one, and returns the first after which the pod no longer
// fits the cards. They come first, see ledger.Nominate.
func (n *Node) keptFor(pod *Pod, cards []placement.Card) (nominee gpu.Pod, kept bool) {
	if len(n.Nominees) > 0 {
		cards = slices.Clone(cards)
	}
	for i := range n.Nominees {
		candidate := &n.Nominees[i]
		if candidate.Pod.Priority < pod.Priority || candidate.Pod.UID == pod.UID {
			continue
		}
		placement.Use(cards, candidate.On)
		if placement.Fit(cards, pod.Demand()) != reasons.Fits {
			return candidate.Pod, true
		}
	}
	return gpu.Pod{}, false
}

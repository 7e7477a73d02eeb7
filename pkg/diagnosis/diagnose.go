package diagnosis

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
)

// Diagnosis is why a pod is pending.
type Diagnosis struct {
	Reason Reason
	// Message is the explanation that is shown to users.
	Message string
}

// Node is a node that shares its cards.
type Node struct {
	// Object is the Node object. Its name, labels and taints are used.
	Object *corev1.Node
	// Unit is the unit of the cards' memory.
	Unit  gpu.Unit
	Cards []placement.Card
	// Closed is the reason why no new pod can run on the node, see the function Closed; empty if pods can.
	Closed string
	// Requested is the sum of the requests of the node's pods, with those on failed or missing cards.
	Requested gpu.Memory
	// Terminating are the node's pods that are being deleted.
	Terminating []Terminating
	// Nominees are the pods that are nominated to the node and have no allocation yet, the most important one first.
	Nominees []gpu.Pod
}

// NominationValid reports whether a pod's nomination to a node is still valid: the node admits the pod, and the pod fits one
// of its cards or a pod of lower priority is terminating there. kube-scheduler doesn't always clear an invalid nomination:
// nominatedNodeName stays if its dry run needs no victims (k8s.io/kubernetes pkg/scheduler/framework/preemption, Preempt).
func NominationValid(pod *Pod, node *Node, now time.Time) bool {
	if node.rejection(pod) != "" {
		return false
	}
	return placement.Fit(node.Cards, pod.Request) == placement.Fits ||
		slices.ContainsFunc(node.Terminating, func(t Terminating) bool { return t.Priority < pod.Priority && !t.Overdue(now) })
}

// free returns the free memory of the healthy cards, and the most that one card has.
func (n *Node) free() (sum, largest gpu.Memory) {
	for i := range n.Cards {
		if card := &n.Cards[i]; !card.Unhealthy {
			sum, largest = sum.Add(card.Free()), max(largest, card.Free())
		}
	}
	return sum, largest
}

// bytes converts an amount to bytes, to compare amounts of nodes with different units. It saturates.
func (n *Node) bytes(m gpu.Memory) gpu.Memory {
	if unit := gpu.Memory(n.Unit); unit > 0 && m > math.MaxInt64/unit {
		return math.MaxInt64
	}
	return m * gpu.Memory(n.Unit)
}

// rejection returns why the pod can't use the node, independent of GPU memory; empty if it can.
func (n *Node) rejection(pod *Pod) string {
	if n.Closed != "" {
		return n.Closed
	}
	if ok, err := pod.affinity.Match(n.Object); err != nil || !ok {
		return "the pod's node selector or affinity rules it out"
	}
	taint, untolerated := schedulinghelper.FindMatchingUntoleratedTaint(klog.Background(), n.Object.Spec.Taints, pod.tolerations,
		func(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }, true)
	if untolerated {
		return fmt.Sprintf("the pod doesn't tolerate its taint %s", taint.ToString())
	}
	return ""
}

// EligibleNodes returns the names of the nodes that the pod may use, independent of their free memory.
func EligibleNodes(nodes []Node, pod *Pod) []string {
	var names []string
	for i := range nodes {
		if nodes[i].rejection(pod) == "" {
			names = append(names, nodes[i].Object.Name)
		}
	}
	return names
}

// Diagnoser diagnoses pods against the state of the nodes at one moment. Pods with the same request and node constraints
// have the same diagnosis, which is computed once. A Diagnoser is not safe for concurrent use.
type Diagnoser struct {
	nodes []Node
	now   time.Time
	// active are the names of the schedulers that have tried a pending pod.
	active map[string]bool
	cache  map[string]Diagnosis
}

// UntriedAfter is how long kube-scheduler may leave a pod untried before its diagnosis says so. A scheduler that runs tries a
// new pod at once, and in a long queue after seconds.
const UntriedAfter = 30 * time.Second

// NewDiagnoser returns a Diagnoser for the nodes, which must be sorted by name and have cards. pending are all pending pods:
// they show which schedulers run.
func NewDiagnoser(nodes []Node, pending []*Pod, now time.Time) *Diagnoser {
	d := &Diagnoser{nodes: nodes, now: now, active: map[string]bool{}, cache: map[string]Diagnosis{}}
	for _, pod := range pending {
		if pod.Tried {
			d.active[pod.Scheduler] = true
		}
	}
	return d
}

// Diagnose returns why the pod, which has no node, is pending. It depends on the pod's request, scheduling gates,
// nomination, and on its constraints on nodes. wait is what the pod's group waits for; nil if the pod doesn't wait for a
// group.
func (d *Diagnoser) Diagnose(pod *Pod, wait *GroupWait) Diagnosis {
	switch {
	case len(pod.Gates) > 0:
		return Diagnosis{Gated, "the pod is held back by its scheduling gates: " + strings.Join(pod.Gates, ", ")}
	case d.nominated(pod):
		return Diagnosis{Nominated, fmt.Sprintf("pods of lower priority are leaving %s to make room for it", pod.NominatedNode)}
	}
	own := d.ownDiagnosis(pod)
	switch {
	case wait == nil:
		return own
	case slices.Contains(ownReasons, own.Reason), wait.Untried && own.Reason != Fits:
		return Diagnosis{own.Reason, own.Message + "; " + wait.String()}
	}
	return Diagnosis{WaitsForGroup, wait.String()}
}

// ownDiagnosis returns the diagnosis of the pod as if it belonged to no group. Results are cached.
func (d *Diagnoser) ownDiagnosis(pod *Pod) Diagnosis {
	if pod.cacheKey == "" {
		return d.diagnose(pod).orReserved(pod)
	}
	diagnosis, cached := d.cache[pod.cacheKey]
	if !cached {
		diagnosis = d.diagnose(pod)
		d.cache[pod.cacheKey] = diagnosis
	}
	return diagnosis.orReserved(pod)
}

// orReserved returns another diagnosis if a card has room, but kube-scheduler's last message says that the memory is
// kept for a group.
func (d Diagnosis) orReserved(pod *Pod) Diagnosis {
	if group, reserved := placement.ReservedFor(pod.Message); reserved && d.Reason == Fits {
		return Diagnosis{KeptForGroup, placement.Reserved.TextFor(group)}
	}
	return d
}

// nominated reports whether the pod has a valid nomination to one of the nodes.
func (d *Diagnoser) nominated(pod *Pod) bool {
	i, found := slices.BinarySearchFunc(d.nodes, pod.NominatedNode, func(node Node, name string) int {
		return cmp.Compare(node.Object.Name, name)
	})
	return found && NominationValid(pod, &d.nodes[i], d.now)
}

func (d *Diagnoser) diagnose(pod *Pod) Diagnosis {
	if len(d.nodes) == 0 {
		return Diagnosis{NoNode, "no node shares GPU memory"}
	}
	rejections := map[string][]string{}
	found := map[Reason][]*Node{}
	for i := range d.nodes {
		node := &d.nodes[i]
		if rejection := node.rejection(pod); rejection != "" {
			rejections[rejection] = append(rejections[rejection], node.Object.Name)
			continue
		}
		reason := reasonFor(node.Cards, pod.Request)
		found[reason] = append(found[reason], node)
	}
	text := rejectionText(rejections)
	for _, reason := range cardReasons {
		if len(found[reason]) > 0 {
			return Diagnosis{reason, reasonText(reason, found[reason]) + text}
		}
	}
	return Diagnosis{NoNode, "no node that shares GPU memory can take the pod" + text}
}

// reasonText explains the reason with the node that has the most free memory as the example.
func reasonText(reason Reason, nodes []*Node) string {
	var best *Node
	var free, largest gpu.Memory
	for _, node := range nodes {
		// Among equal nodes, the first wins.
		sum, piece := node.free()
		if best == nil || cmp.Or(cmp.Compare(node.bytes(piece), best.bytes(largest)), cmp.Compare(node.bytes(sum), best.bytes(free))) > 0 {
			best, free, largest = node, sum, piece
		}
	}
	name, others := best.Object.Name, ""
	if n := len(nodes) - 1; n > 0 {
		others = fmt.Sprintf(" (and %s alike)", count(n))
	}
	amount := best.Unit.Format
	switch reason {
	case Fits:
		return fmt.Sprintf("%s has room for it now, %s on one card%s: the scheduler is about to try, or needs something else than GPU memory",
			name, amount(largest), others)
	case Fragmented:
		return fmt.Sprintf("%s free on %s, but the largest piece is %s%s: a pod gets one card", amount(free), name, amount(largest), others)
	case Full:
		if largest == 0 {
			return "the cards that are large enough are taken, nothing of them is free"
		}
		return fmt.Sprintf("the cards that are large enough are taken: the largest free piece is %s, on %s%s", amount(largest), name, others)
	case Unhealthy:
		return fmt.Sprintf("the cards that are large enough are unhealthy, on %s%s", name, others)
	}
	largest = 0
	for _, node := range nodes {
		for i := range node.Cards {
			if memory := node.Cards[i].Memory; node.bytes(memory) > best.bytes(largest) {
				best, largest = node, memory
			}
		}
	}
	return fmt.Sprintf("no card is large enough: the largest has %s, on %s", best.Unit.Format(largest), best.Object.Name)
}

// rejectionText lists why the other nodes can't be used, the most frequent rejection first.
func rejectionText(rejections map[string][]string) string {
	sorted := slices.SortedFunc(maps.Keys(rejections), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(rejections[b]), len(rejections[a])), cmp.Compare(a, b))
	})
	var out strings.Builder
	for _, rejection := range sorted {
		nodes := rejections[rejection]
		where := nodes[0]
		if len(nodes) > 1 {
			where = count(len(nodes))
		}
		fmt.Fprintf(&out, "; %s: %s", where, rejection)
	}
	return out.String()
}

func count(nodes int) string {
	if nodes == 1 {
		return "1 node"
	}
	return fmt.Sprintf("%d nodes", nodes)
}

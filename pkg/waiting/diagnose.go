package waiting

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
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
	// Terminating holds the priorities of the node's pods that should end soon, see protocol.TerminatingPriorities. Only
	// nodes to which a pod is nominated need it.
	Terminating []int32
}

// NominationValid reports whether a pod's nomination to a node is still valid: the node admits the pod, and the pod fits one
// of its cards or a pod of lower priority is terminating there. kube-scheduler doesn't always clear an invalid nomination:
// nominatedNodeName stays if its dry run needs no victims (k8s.io/kubernetes pkg/scheduler/framework/preemption, Preempt).
func NominationValid(pod *corev1.Pod, place *Node) bool {
	if place.rejection(pod, nodeaffinity.GetRequiredNodeAffinity(pod)) != "" {
		return false
	}
	values := protocol.Pod(pod)
	return placement.Fit(place.Cards, values.Request) == placement.Fits ||
		slices.ContainsFunc(place.Terminating, func(priority int32) bool { return priority < values.Priority })
}

// free returns the free memory of the healthy cards, and the most that one card has.
func (p *Node) free() (sum, largest gpu.Memory) {
	for i := range p.Cards {
		if card := &p.Cards[i]; !card.Unhealthy {
			sum, largest = sum.Add(card.Free()), max(largest, card.Free())
		}
	}
	return sum, largest
}

// bytes converts an amount to bytes, to compare amounts of nodes with different units. It saturates.
func (p *Node) bytes(m gpu.Memory) gpu.Memory {
	if unit := gpu.Memory(p.Unit); unit > 0 && m > math.MaxInt64/unit {
		return math.MaxInt64
	}
	return m * gpu.Memory(p.Unit)
}

// rejection returns why the pod can't use the node, independent of GPU memory; empty if it can.
func (p *Node) rejection(pod *corev1.Pod, affinity nodeaffinity.RequiredNodeAffinity) string {
	if p.Closed != "" {
		return p.Closed
	}
	if ok, err := affinity.Match(p.Object); err != nil || !ok {
		return "the pod's node selector or affinity rules it out"
	}
	taint, untolerated := schedulinghelper.FindMatchingUntoleratedTaint(klog.Background(), p.Object.Spec.Taints, pod.Spec.Tolerations,
		func(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }, true)
	if untolerated {
		return fmt.Sprintf("the pod doesn't tolerate its taint %s", taint.ToString())
	}
	return ""
}

// EligibleNodes returns the names of the nodes that the pod may use, independent of their free memory.
func EligibleNodes(places []Node, pod *corev1.Pod) []string {
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	var names []string
	for i := range places {
		if places[i].rejection(pod, affinity) == "" {
			names = append(names, places[i].Object.Name)
		}
	}
	return names
}

// Diagnoser diagnoses pods against the state of the nodes at one moment. Pods with the same request and node constraints
// have the same diagnosis, which is computed once. A Diagnoser is not safe for concurrent use.
type Diagnoser struct {
	nodes []Node
	cache map[string]Diagnosis
}

// NewDiagnoser returns a Diagnoser for the nodes, which must be sorted by name and have cards.
func NewDiagnoser(places []Node) *Diagnoser {
	return &Diagnoser{nodes: places, cache: map[string]Diagnosis{}}
}

// Diagnose returns why the pod, which has no node, is pending. It depends on the pod's request, scheduling gates,
// nomination, and on its constraints on nodes.
func (e *Diagnoser) Diagnose(pod *corev1.Pod) Diagnosis {
	switch {
	case len(pod.Spec.SchedulingGates) > 0:
		return Diagnosis{Gated, "the pod is held back by its scheduling gates: " + gates(pod)}
	case e.nominated(pod):
		return Diagnosis{Nominated, fmt.Sprintf("pods of lower priority are leaving %s to make room for it", pod.Status.NominatedNodeName)}
	case len(e.nodes) == 0:
		return Diagnosis{NoNode, "no node shares GPU memory"}
	}
	key, err := cacheKey(pod)
	if err != nil {
		return e.diagnose(pod) // Without a key it can't be cached.
	}
	diagnosis, cached := e.cache[key]
	if !cached {
		diagnosis = e.diagnose(pod)
		e.cache[key] = diagnosis
	}
	return diagnosis
}

// nominated reports whether the pod has a valid nomination to one of the nodes.
func (e *Diagnoser) nominated(pod *corev1.Pod) bool {
	i, found := slices.BinarySearchFunc(e.nodes, pod.Status.NominatedNodeName, func(p Node, name string) int {
		return cmp.Compare(p.Object.Name, name)
	})
	return found && NominationValid(pod, &e.nodes[i])
}

// cacheKey returns a key made of all fields of a pod that diagnose uses.
func cacheKey(pod *corev1.Pod) (string, error) {
	spec := corev1.PodSpec{NodeSelector: pod.Spec.NodeSelector, Tolerations: pod.Spec.Tolerations}
	if pod.Spec.Affinity != nil {
		spec.Affinity = &corev1.Affinity{NodeAffinity: pod.Spec.Affinity.NodeAffinity}
	}
	text, err := spec.Marshal()
	return protocol.PodRequest(pod).String() + " " + string(text), err
}

func (e *Diagnoser) diagnose(pod *corev1.Pod) Diagnosis {
	affinity, request := nodeaffinity.GetRequiredNodeAffinity(pod), protocol.PodRequest(pod)
	rejections := map[string][]string{}
	found := map[Reason][]*Node{}
	for i := range e.nodes {
		p := &e.nodes[i]
		if rejection := p.rejection(pod, affinity); rejection != "" {
			rejections[rejection] = append(rejections[rejection], p.Object.Name)
			continue
		}
		reason := reasonFor(p.Cards, request)
		found[reason] = append(found[reason], p)
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
func reasonText(reason Reason, places []*Node) string {
	var best *Node
	var free, largest gpu.Memory
	for _, p := range places {
		// Among equal nodes, the first wins.
		sum, piece := p.free()
		if best == nil || cmp.Or(cmp.Compare(p.bytes(piece), best.bytes(largest)), cmp.Compare(p.bytes(sum), best.bytes(free))) > 0 {
			best, free, largest = p, sum, piece
		}
	}
	name, others := best.Object.Name, ""
	if n := len(places) - 1; n > 0 {
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
	for _, p := range places {
		for i := range p.Cards {
			if memory := p.Cards[i].Memory; p.bytes(memory) > best.bytes(largest) {
				best, largest = p, memory
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

func gates(pod *corev1.Pod) string {
	names := make([]string, len(pod.Spec.SchedulingGates))
	for i, gate := range pod.Spec.SchedulingGates {
		names[i] = gate.Name
	}
	return strings.Join(names, ", ")
}

// SchedulerMessage returns kube-scheduler's last message about a pod without a node, from the pod's PodScheduled condition.
func SchedulerMessage(pod *corev1.Pod) string {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status != corev1.ConditionTrue {
			if reason := cmp.Or(condition.Message, condition.Reason); reason != "" {
				return reason
			}
		}
	}
	return fmt.Sprintf("scheduler %q has not tried it yet", cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName))
}

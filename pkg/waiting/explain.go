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

// Why is why a pod waits.
type Why struct {
	Cause Cause
	// Explanation is for people.
	Explanation string
}

// Place is a node that shares its cards, as the question sees it whether a pod fits.
type Place struct {
	// Node is read for its name, labels and taints.
	Node *corev1.Node
	// Unit is that of the cards' memory.
	Unit  gpu.Unit
	Cards []placement.Card
	// Closed is why no pod can go there, see Closed; empty for a node in order.
	Closed string
	// Leaving has the priorities of the pods there that should end soon, see protocol.Leaving. It is read for nodes
	// only that pods are nominated to.
	Leaving []int32
}

// NominationStands reports whether a pod's nomination to the place is to be believed: the pod may go there, and it fits, or
// memory of a pod of lower priority should come free. kube-scheduler doesn't clear one that has become void where its dry
// run finds the node's sum large enough without any victim (k8s.io/kubernetes pkg/scheduler/framework/preemption, Preempt:
// after an error nominatedNodeName stays).
func NominationStands(pod *corev1.Pod, place *Place) bool {
	if place.refusal(pod, nodeaffinity.GetRequiredNodeAffinity(pod)) != "" {
		return false
	}
	values := protocol.Pod(pod)
	return placement.Fit(place.Cards, values.Request) == placement.Fits ||
		slices.ContainsFunc(place.Leaving, func(priority int32) bool { return priority < values.Priority })
}

// free returns what healthy cards have left, and the largest piece of it.
func (p *Place) free() (sum, largest gpu.Memory) {
	for i := range p.Cards {
		if card := &p.Cards[i]; !card.Unhealthy {
			sum, largest = sum.Add(card.Free()), max(largest, card.Free())
		}
	}
	return sum, largest
}

// bytes makes amounts of different nodes comparable. It stops at the largest amount.
func (p *Place) bytes(m gpu.Memory) gpu.Memory {
	if unit := gpu.Memory(p.Unit); unit > 0 && m > math.MaxInt64/unit {
		return math.MaxInt64
	}
	return m * gpu.Memory(p.Unit)
}

// refusal is why a place isn't one for the pod, whatever memory it has; empty where it may go there.
func (p *Place) refusal(pod *corev1.Pod, affinity nodeaffinity.RequiredNodeAffinity) string {
	if p.Closed != "" {
		return p.Closed
	}
	if ok, err := affinity.Match(p.Node); err != nil || !ok {
		return "the pod's node selector or affinity rules it out"
	}
	taint, untolerated := schedulinghelper.FindMatchingUntoleratedTaint(klog.Background(), p.Node.Spec.Taints, pod.Spec.Tolerations,
		func(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }, true)
	if untolerated {
		return fmt.Sprintf("the pod doesn't tolerate its taint %s", taint.ToString())
	}
	return ""
}

// Reach returns the names of the places that the pod may go to, whatever is taken there.
func Reach(places []Place, pod *corev1.Pod) []string {
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	var names []string
	for i := range places {
		if places[i].refusal(pod, affinity) == "" {
			names = append(names, places[i].Node.Name)
		}
	}
	return names
}

// Explainer explains from one moment's places. Pods of one shape wait for one reason, and a cluster has few shapes: each
// is looked into once. It is not for use from several goroutines.
type Explainer struct {
	places []Place
	known  map[string]Why
}

// NewExplainer returns an Explainer for places, each of which has cards, in order of their names.
func NewExplainer(places []Place) *Explainer {
	return &Explainer{places: places, known: map[string]Why{}}
}

// Explain says why the pod, which has no node, waits. Read of it are what it asks for, its gates, its nomination, and
// what its spec says about nodes.
func (e *Explainer) Explain(pod *corev1.Pod) Why {
	switch {
	case len(pod.Spec.SchedulingGates) > 0:
		return Why{Gated, "the pod is held back by its scheduling gates: " + gates(pod)}
	case e.nominated(pod):
		return Why{Nominated, fmt.Sprintf("pods of lower priority are leaving %s to make room for it", pod.Status.NominatedNodeName)}
	case len(e.places) == 0:
		return Why{NoNode, "no node shares GPU memory"}
	}
	shape, err := shapeOf(pod)
	if err != nil {
		return e.lookInto(pod) // What can't be written down can't be found again either.
	}
	why, known := e.known[shape]
	if !known {
		why = e.lookInto(pod)
		e.known[shape] = why
	}
	return why
}

// nominated reports whether the pod is nominated to a place, and that is to be believed.
func (e *Explainer) nominated(pod *corev1.Pod) bool {
	i, found := slices.BinarySearchFunc(e.places, pod.Status.NominatedNodeName, func(p Place, name string) int {
		return cmp.Compare(p.Node.Name, name)
	})
	return found && NominationStands(pod, &e.places[i])
}

// shapeOf is all of a pod that lookInto reads.
func shapeOf(pod *corev1.Pod) (string, error) {
	spec := corev1.PodSpec{NodeSelector: pod.Spec.NodeSelector, Tolerations: pod.Spec.Tolerations}
	if pod.Spec.Affinity != nil {
		spec.Affinity = &corev1.Affinity{NodeAffinity: pod.Spec.Affinity.NodeAffinity}
	}
	text, err := spec.Marshal()
	return protocol.PodRequest(pod).String() + " " + string(text), err
}

func (e *Explainer) lookInto(pod *corev1.Pod) Why {
	affinity, request := nodeaffinity.GetRequiredNodeAffinity(pod), protocol.PodRequest(pod)
	refusals := map[string][]string{}
	found := map[Cause][]*Place{}
	for i := range e.places {
		p := &e.places[i]
		if why := p.refusal(pod, affinity); why != "" {
			refusals[why] = append(refusals[why], p.Node.Name)
			continue
		}
		cause := causeOf(p.Cards, request)
		found[cause] = append(found[cause], p)
	}
	text := refusalText(refusals)
	// The first of these that any node has is what it takes to find room.
	for _, cause := range ofCards {
		if len(found[cause]) > 0 {
			return Why{cause, causeText(cause, found[cause]) + text}
		}
	}
	return Why{NoNode, "no node that shares GPU memory can take the pod" + text}
}

// causeText explains by the example of the node that comes closest.
func causeText(cause Cause, places []*Place) string {
	var best *Place
	var free, largest gpu.Memory
	for _, p := range places {
		// Of equals the first stays.
		sum, piece := p.free()
		if best == nil || cmp.Or(cmp.Compare(p.bytes(piece), best.bytes(largest)), cmp.Compare(p.bytes(sum), best.bytes(free))) > 0 {
			best, free, largest = p, sum, piece
		}
	}
	name, others := best.Node.Name, ""
	if n := len(places) - 1; n > 0 {
		others = fmt.Sprintf(" (and %s alike)", count(n))
	}
	amount := best.Unit.Format
	switch cause {
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
	return fmt.Sprintf("no card is large enough: the largest has %s, on %s", best.Unit.Format(largest), best.Node.Name)
}

// refusalText tells what else there is, most frequent first.
func refusalText(refusals map[string][]string) string {
	reasons := slices.SortedFunc(maps.Keys(refusals), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(refusals[b]), len(refusals[a])), cmp.Compare(a, b))
	})
	var out strings.Builder
	for _, reason := range reasons {
		nodes := refusals[reason]
		who := nodes[0]
		if len(nodes) > 1 {
			who = count(len(nodes))
		}
		fmt.Fprintf(&out, "; %s: %s", who, reason)
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

// Reason is what kube-scheduler itself said last about a pod without a node, in its own words.
func Reason(pod *corev1.Pod) string {
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status != corev1.ConditionTrue {
			if reason := cmp.Or(condition.Message, condition.Reason); reason != "" {
				return reason
			}
		}
	}
	return fmt.Sprintf("scheduler %q has not tried it yet", cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName))
}

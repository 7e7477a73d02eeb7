package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Objects are the objects that a Report is built from.
type Objects struct {
	Nodes []*corev1.Node
	Pods  []*corev1.Pod
	// Now is the time for which the report is: a pod that should have ended by then makes no room.
	Now time.Time
}

// hasNode reports whether a node of that name was read.
func (o Objects) hasNode(name string) bool {
	return slices.ContainsFunc(o.Nodes, func(node *corev1.Node) bool { return node.Name == name })
}

// Build returns the report for nodes and pods. It omits nodes that neither share GPU memory nor have pods that use it, pods
// that ask for none or have ended, and pods of nodes that are not given.
func Build(objects Objects) Report {
	report := Report{APIVersion: ReportAPIVersion, Kind: ReportKind, Nodes: []Node{}, PendingPods: []PendingPod{}}

	bound := map[string][]*corev1.Pod{}
	var pending []*corev1.Pod
	for _, pod := range objects.Pods {
		switch {
		case protocol.Terminal(pod) || protocol.PodRequest(pod) == 0:
		case pod.Spec.NodeName != "":
			bound[pod.Spec.NodeName] = append(bound[pod.Spec.NodeName], pod)
		case pod.DeletionTimestamp == nil:
			pending = append(pending, pod)
		}
	}
	var nodes []diagnosis.Node
	byName := func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) }
	for _, object := range slices.SortedFunc(slices.Values(objects.Nodes), byName) {
		node := buildNode(object, bound[object.Name])
		if len(node.Cards) > 0 || len(node.Pods) > 0 {
			report.Nodes = append(report.Nodes, node)
		}
		if len(node.Cards) > 0 {
			diagnosed := newNode(object, &node)
			diagnosed.Terminating = protocol.TerminatingPriorities(bound[object.Name], objects.Now)
			nodes = append(nodes, diagnosed)
		}
	}
	diagnoser, waits := diagnosis.NewDiagnoser(nodes), groupWaits(objects.Pods, objects.Now)
	for _, pod := range pending {
		report.PendingPods = append(report.PendingPods, buildPending(pod, waits[pod.UID], diagnoser))
	}
	slices.SortFunc(report.PendingPods, func(a, b PendingPod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	report.Cluster = sumUp(report.Nodes)
	return report
}

func buildNode(object *corev1.Node, pods []*corev1.Pod) Node {
	parsed := protocol.ParseNode(object)
	node := Node{Name: object.Name, Address: address(object), Problems: []string{}, Cards: []Card{}, Pods: []Pod{}}
	node.Unit, node.UnitInferred = Unit(gpu.UnitOf(parsed.Unit, parsed.Cards)), parsed.Unit == 0
	for _, card := range parsed.Cards {
		node.Cards = append(node.Cards, buildCard(card))
		node.Total = node.Total.Add(card.Memory)
	}
	slices.SortFunc(node.Cards, func(a, b Card) int { return cmp.Compare(a.Index, b.Index) })

	for _, object := range pods {
		node.addPod(object)
	}
	slices.SortFunc(node.Pods, func(a, b Pod) int {
		return cmp.Or(cmp.Compare(a.firstCard(), b.firstCard()), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	node.Percent = percent(node.Allocated, node.Total)
	node.addIsolation(parsed.Isolation)
	node.judge(object, parsed)
	return node
}

// newPlace converts a node for the diagnosis of pending pods.
func newNode(object *corev1.Node, node *Node) diagnosis.Node {
	p := diagnosis.Node{Object: object, Unit: gpu.Unit(node.Unit), Closed: node.closed}
	for _, card := range node.Cards {
		p.Cards = append(p.Cards, placement.Card{
			Index: card.Index, Memory: card.Total, Used: card.Allocated, Unhealthy: !card.Healthy,
		})
	}
	return p
}

func buildCard(card gpu.Card) Card {
	out := Card{
		Index: card.Index, UUID: card.UUID, Model: card.Model, Total: card.Memory,
		Healthy: card.Healthy(), Reason: card.Unhealthy,
	}
	if card.NUMANode != gpu.NoNUMANode {
		out.NUMANode = &card.NUMANode
	}
	return out
}

// addPod adds a bound pod to the node and its memory to the cards that its annotations name.
func (n *Node) addPod(object *corev1.Pod) {
	pod := Pod{
		Namespace:   object.Namespace,
		Name:        object.Name,
		UID:         object.UID,
		Phase:       string(cmp.Or(object.Status.Phase, corev1.PodPending)),
		Terminating: object.DeletionTimestamp != nil,
		Request:     protocol.PodRequest(object),
		Shares:      []Share{},
	}
	shares, err := protocol.PodPlacement(object)
	switch {
	case errors.Is(err, protocol.ErrNotAssumed):
		pod.Notes = append(pod.Notes, "no card chosen")
	case err != nil:
		pod.Notes = append(pod.Notes, err.Error())
	}
	pod.addIsolation(object)
	pod.unknownCard = pod.Request
	for _, share := range shares {
		pod.Shares = append(pod.Shares, Share{Card: share.Card, Memory: share.Memory})
		if card := n.card(share.Card); card != nil {
			card.Allocated = card.Allocated.Add(share.Memory)
			pod.unknownCard = pod.unknownCard.Sub(share.Memory)
		} else {
			pod.Notes = append(pod.Notes, fmt.Sprintf("GPU%d is not on the node", share.Card))
		}
	}
	n.Allocated, n.UnknownCard = n.Allocated.Add(pod.Request), n.UnknownCard.Add(pod.unknownCard)
	n.Pods = append(n.Pods, pod)
}

// judge sets the node's problems and its free memory. All pods must have been added.
func (n *Node) judge(object *corev1.Node, parsed protocol.Node) {
	problem := func(format string, args ...any) { n.Problems = append(n.Problems, fmt.Sprintf(format, args...)) }
	for _, reason := range diagnosis.Closed(object, parsed.WholeCards) {
		problem("%s", reason)
		n.closed = cmp.Or(n.closed, reason)
	}
	if parsed.Problem != nil {
		problem("%v", parsed.Problem)
	}
	for i := range n.Cards {
		card := &n.Cards[i]
		if !card.Healthy {
			problem("GPU%d is unhealthy: %s", card.Index, card.Reason)
		} else if n.closed == "" {
			free := card.Total.Sub(card.Allocated)
			n.Free, n.LargestFree = n.Free.Add(free), max(n.LargestFree, free)
		}
		if card.Allocated > card.Total {
			card.Oversubscribed = true
			problem("GPU%d is oversubscribed: %d of %d (%s)", card.Index, card.Allocated, card.Total, n.Unit)
			for j := range n.Pods {
				if pod := &n.Pods[j]; pod.on(card.Index) > 0 {
					pod.Notes = append(pod.Notes, fmt.Sprintf("GPU%d is oversubscribed", card.Index))
				}
			}
		}
	}
	if n.UnknownCard > 0 {
		problem("pods whose card is not known hold %d (%s)", n.UnknownCard, n.Unit)
	}
}

// card returns the node's card of that index, or nil.
func (n *Node) card(index int) *Card {
	i := slices.IndexFunc(n.Cards, func(c Card) bool { return c.Index == index })
	if i < 0 {
		return nil
	}
	return &n.Cards[i]
}

// on returns the pod's memory on one card.
func (p *Pod) on(card int) gpu.Memory {
	for _, share := range p.Shares {
		if share.Card == card {
			return share.Memory
		}
	}
	return 0
}

// firstCard returns the lowest card index of a pod, to sort pods. Pods without a card come last.
func (p *Pod) firstCard() int {
	if len(p.Shares) == 0 {
		return math.MaxInt
	}
	return p.Shares[0].Card
}

func buildPending(pod *corev1.Pod, wait *diagnosis.GroupWait, diagnoser *diagnosis.Diagnoser) PendingPod {
	pending := diagnosis.NewPod(pod)
	why := diagnoser.Diagnose(pending, wait)
	return PendingPod{
		Namespace: pod.Namespace,
		Name:      pod.Name,
		UID:       pod.UID,
		Request:   protocol.PodRequest(pod),
		Scheduler: pod.Spec.SchedulerName,
		Reason:    pending.Message,

		Cause: why.Reason, Explanation: why.Message,
	}
}

// sumUp returns the sum of the nodes in a common unit: theirs if it is the same, otherwise GiB or MiB, whichever divides all
// units.
func sumUp(nodes []Node) Cluster {
	var sum Cluster
	if len(nodes) > 0 {
		sum.Unit = nodes[0].Unit
	}
	if slices.ContainsFunc(nodes, func(n Node) bool { return n.Unit != sum.Unit }) {
		sum.Unit = Unit(gpu.GiB)
	}
	if slices.ContainsFunc(nodes, func(n Node) bool { return n.Unit%sum.Unit != 0 }) {
		sum.Unit = Unit(gpu.MiB)
	}
	for _, node := range nodes {
		sum.Allocated = sum.Allocated.Add(convert(node.Allocated, node.Unit, sum.Unit))
		sum.Total = sum.Total.Add(convert(node.Total, node.Unit, sum.Unit))
		sum.Free = sum.Free.Add(convert(node.Free, node.Unit, sum.Unit))
		sum.LargestFree = max(sum.LargestFree, convert(node.LargestFree, node.Unit, sum.Unit))
	}
	sum.Percent = percent(sum.Allocated, sum.Total)
	return sum
}

// convert converts memory to a smaller unit. It saturates.
func convert(memory gpu.Memory, from, to Unit) gpu.Memory {
	factor := gpu.Memory(from / to)
	if product := memory * factor; factor == 0 || product/factor == memory {
		return product
	}
	return math.MaxInt64
}

func percent(part, whole gpu.Memory) int {
	if whole == 0 {
		return 0
	}
	return int(float64(part) * 100 / float64(whole))
}

func address(node *corev1.Node) string {
	for _, address := range node.Status.Addresses {
		if address.Type == corev1.NodeInternalIP {
			return address.Address
		}
	}
	if len(node.Status.Addresses) > 0 {
		return node.Status.Addresses[0].Address
	}
	return "unknown"
}

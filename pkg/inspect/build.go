package inspect

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/gpushare/gpushare/pkg/diagnosis"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Objects are the objects that a Report is built from.
type Objects struct {
	Nodes []*corev1.Node
	Pods  []*corev1.Pod
	// Others are the pods that are bound and ask for no GPU memory; nil if they were not read.
	Others []*corev1.Pod
	// PodGroups are read if a pending pod names one; nil if none does, or if the API server has none.
	PodGroups map[gang.Key]gang.PodGroup
	// podGroupsForbidden is true if the user may not list them.
	podGroupsForbidden bool
	// PodsOnly is true if nodes, and pods of other namespaces, were not read.
	PodsOnly bool
	// Now is the time for which the report is: a pod that should have ended by then makes no room.
	Now time.Time
}

// notSeen is the remark for users with rights in one namespace.
const notSeen = "Nodes, or pods of other namespaces, can't be listed: causes about nodes come from kube-scheduler's message."

// podGroupsNotSeen is the remark for users that may not list PodGroups, if pending pods name some.
const podGroupsNotSeen = "PodGroups can't be listed: what their pods wait for isn't known."

// hasNode reports whether a node of that name was read.
func (o Objects) hasNode(name string) bool {
	return slices.ContainsFunc(o.Nodes, func(node *corev1.Node) bool { return node.Name == name })
}

// hasPodsOn reports whether a pod was read that is bound to a node of that name.
func (o Objects) hasPodsOn(name string) bool {
	return slices.ContainsFunc(o.Pods, func(pod *corev1.Pod) bool { return pod.Spec.NodeName == name })
}

// Build returns the report for nodes and pods. It omits nodes that neither share GPU memory nor have pods that use it, and
// pods that ask for none or have ended.
func Build(objects Objects) Report {
	report := Report{
		APIVersion: ReportAPIVersion, Kind: ReportKind, Problems: []string{}, Nodes: []Node{}, NodesWithoutCards: []NodeWithoutCards{},
		PendingPods: []PendingPod{}, RequestProblems: []RequestProblem{},
	}
	// The order in which the extender gets the pods when it starts.
	objects.Pods = slices.SortedFunc(slices.Values(objects.Pods), byName)
	bound, bypasses := map[string][]*corev1.Pod{}, map[string]int{}
	var pending []*corev1.Pod
	for _, pod := range objects.Pods {
		if problem, found := objects.requestProblem(pod); found {
			report.RequestProblems = append(report.RequestProblems, problem)
		}
		switch {
		case protocol.Terminal(pod) || protocol.PodRequest(pod) == 0:
		case pod.Spec.NodeName != "":
			bound[pod.Spec.NodeName] = append(bound[pod.Spec.NodeName], pod)
			if diagnosis.BoundWithoutExtender(pod) {
				bypasses[pod.Spec.SchedulerName]++
			}
		case pod.DeletionTimestamp == nil:
			pending = append(pending, pod)
		}
	}
	if problem := diagnosis.BypassProblem(bypasses); problem != "" {
		report.Problems = append(report.Problems, problem)
	}
	if objects.PodsOnly {
		report.NotSeen = notSeen
	}
	if objects.podGroupsForbidden {
		report.NotSeen = strings.TrimSpace(report.NotSeen + " " + podGroupsNotSeen)
	}
	report.addNodes(objects, bound)
	report.addPending(objects, pending)
	return report
}

// addPending adds the pending pods with their diagnosis.
func (r *Report) addPending(objects Objects, pending []*corev1.Pod) {
	if len(pending) == 0 {
		return // The diagnosis of none costs as much as that of one.
	}
	diagnoser, groups := diagnosis.FromObjects(objects.Nodes, objects.Pods, objects.Now), newGroupState(objects.Pods, objects.PodGroups, objects.Now)
	if objects.PodsOnly {
		diagnoser = diagnosis.PodsOnly(objects.Pods, objects.Now)
	}
	pods := make([]*diagnosis.Pod, len(pending))
	for i, pod := range pending {
		pods[i] = diagnosis.NewPod(pod)
	}
	diagnoses := diagnoser.DiagnoseAll(pods, func(i int) *diagnosis.GroupWait { return groups.wait(pending[i], pods[i]) })
	for i, pod := range pending {
		r.PendingPods = append(r.PendingPods, buildPending(pod, pods[i], diagnoses[i]))
	}
}

// requestProblem returns the problem with the pod's request; false if there is none, or if the pod ends or has ended.
func (o Objects) requestProblem(pod *corev1.Pod) (RequestProblem, bool) {
	problem := diagnosis.RequestProblem(pod)
	if unserved := diagnosis.UnservedRequest(pod); problem == "" && unserved != "" && !o.PodsOnly && !diagnosis.OffersWholeCards(o.Nodes) {
		problem = unserved
	}
	return RequestProblem{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, Node: pod.Spec.NodeName, Problem: problem},
		problem != "" && pod.DeletionTimestamp == nil && !protocol.Terminal(pod)
}

func byName[Object metav1.Object](a, b Object) int {
	return cmp.Or(cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
}

// addNodes adds the nodes and their sum to the report, also deleted nodes to which pods are bound.
func (r *Report) addNodes(objects Objects, bound map[string][]*corev1.Pod) {
	units, existing, l := map[gpu.Unit][]string{}, map[string]bool{}, diagnosis.NewLedger(objects.Nodes, objects.Pods)
	for _, object := range objects.Nodes {
		existing[object.Name] = true
	}
	nodes := slices.Clone(objects.Nodes)
	for name := range bound {
		if !existing[name] && !objects.PodsOnly {
			nodes = append(nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		}
	}
	for _, object := range slices.SortedFunc(slices.Values(nodes), byName) {
		state, _ := l.Node(object.Name)
		state.Gone = !existing[object.Name]
		node := buildNode(object, bound[object.Name], &state)
		switch {
		case len(node.Cards) > 0:
			units[node.Unit] = append(units[node.Unit], node.Name)
			r.Nodes = append(r.Nodes, node)
		case len(node.Pods) > 0:
			r.Nodes = append(r.Nodes, node)
		case len(node.Problems) > 0:
			r.NodesWithoutCards = append(r.NodesWithoutCards, NodeWithoutCards{Name: node.Name, Problems: node.Problems})
		}
	}
	if problem := diagnosis.UnitsProblem(units); problem != "" {
		r.Problems = append(r.Problems, problem)
	}
	objects.addStranded(r.Nodes, l)
	r.sumUp()
}

// buildNode returns the node with its pods. state is what the ledger has of it.
func buildNode(object *corev1.Node, pods []*corev1.Pod, state *ledger.Node) Node {
	parsed := protocol.ParseNode(object)
	node := Node{
		Name: object.Name, Address: address(object), Simulated: parsed.Simulated, Problems: []string{}, Cards: []Card{}, Pods: []Pod{},
	}
	node.Unit, node.UnitInferred = gpu.UnitOf(state.Unit, state.Cards), state.Unit == 0
	for i, card := range state.Cards {
		out := buildCard(card, state.Cores == reasons.Fits)
		out.Allocated, out.AllocatedCores = state.Used[i], state.UsedCores[i]
		node.Cards = append(node.Cards, out)
		node.Total = node.Total.Add(card.Memory)
	}
	node.Adapters = slices.SortedFunc(slices.Values(parsed.Adapters), func(a, b gpu.Adapter) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortFunc(node.Cards, func(a, b Card) int { return cmp.Compare(a.Index, b.Index) })

	allocations := map[types.UID]ledger.Allocation{}
	for _, allocation := range state.Allocations {
		allocations[types.UID(allocation.UID)] = allocation
	}
	for _, object := range pods {
		node.addPod(object, allocations[object.UID])
	}
	slices.SortFunc(node.Pods, func(a, b Pod) int {
		return cmp.Or(cmp.Compare(a.firstCard(), b.firstCard()), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	node.Percent = percent(node.Allocated, node.Total)
	node.addIsolation(parsed.Isolation)
	node.judge(state)
	return node
}

func buildCard(card gpu.Card, countsCores bool) Card {
	out := Card{
		Index: card.Index, UUID: card.UUID, Model: card.Model, Total: card.Memory,
		Healthy: card.Healthy(), Reason: card.Unhealthy, RDMAPorts: card.RDMAPorts,
	}
	if card.NUMANode != gpu.NoNUMANode {
		out.NUMANode = &card.NUMANode
	}
	if countsCores {
		out.Cores = gpu.CardCores
	}
	return out
}

// addPod adds a bound pod. Its allocation has the cards that its annotations name, or those on which the node is likely to place it.
func (n *Node) addPod(object *corev1.Pod, allocation ledger.Allocation) {
	pod := Pod{
		Namespace:   object.Namespace,
		Name:        object.Name,
		UID:         object.UID,
		Phase:       string(cmp.Or(object.Status.Phase, corev1.PodPending)),
		Terminating: object.DeletionTimestamp != nil,
		Request:     allocation.Request,
		Cores:       protocol.PodCores(object),
		Shares:      []Share{},
		Presumed:    allocation.Presumed && len(allocation.Placement) > 0,
		unknownCard: allocation.Request,
	}
	switch _, err := protocol.PodPlacement(object); {
	case errors.Is(err, protocol.ErrNotAssumed):
		pod.Notes = append(pod.Notes, "no card chosen")
	case err != nil:
		pod.Notes = append(pod.Notes, err.Error())
	}
	if diagnosis.BoundWithoutExtender(object) {
		pod.Notes = append(pod.Notes, "bound without the extender")
	}
	pod.addFound(object)
	for _, share := range allocation.Placement {
		pod.Shares = append(pod.Shares, Share{Card: share.Card, Memory: share.Memory, Cores: share.Cores})
		if pod.Presumed {
			pod.Notes = append(pod.Notes, fmt.Sprintf("counted on GPU%d", share.Card))
		}
		if n.card(share.Card) != nil {
			pod.unknownCard = pod.unknownCard.Sub(share.Memory)
		}
	}
	n.Allocated, n.UnknownCard = n.Allocated.Add(pod.Request), n.UnknownCard.Add(pod.unknownCard)
	n.Pods = append(n.Pods, pod)
}

// judge sets the node's problems and its free memory. All pods must have been added.
func (n *Node) judge(state *ledger.Node) {
	n.Gone, n.closed = state.Gone, state.Closed
	for _, problem := range diagnosis.NodeProblems(state) {
		n.Problems = append(n.Problems, problem.Text)
	}
	for i := range n.Cards {
		card := &n.Cards[i]
		if card.Healthy && n.closed == "" {
			free := card.Total.Sub(card.Allocated)
			n.Free, n.LargestFree = n.Free.Add(free), max(n.LargestFree, free)
		}
		card.Oversubscribed = card.Allocated > card.Total || card.AllocatedCores > gpu.CardCores
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

// on returns the pod's part of one card.
func (p *Pod) on(card int) Share {
	for _, share := range p.Shares {
		if share.Card == card {
			return share
		}
	}
	return Share{Card: card}
}

// firstCard returns the lowest card index of a pod, to sort pods. Pods without a card come last.
func (p *Pod) firstCard() int {
	if len(p.Shares) == 0 {
		return math.MaxInt
	}
	return p.Shares[0].Card
}

func buildPending(pod *corev1.Pod, pending *diagnosis.Pod, why diagnosis.Diagnosis) PendingPod {
	out := PendingPod{
		Namespace: pod.Namespace,
		Name:      pod.Name,
		UID:       pod.UID,
		Request:   protocol.PodRequest(pod),
		Cores:     pending.Cores,
		Scheduler: pod.Spec.SchedulerName,
		Reason:    pending.Message,

		Cause: why.Reason, Explanation: why.Message, Since: why.Position.Since.UTC(),
	}
	if why.Position.Queued {
		out.Ahead = &why.Position.Ahead
	}
	if n := pending.NumCards(); n > 1 && pending.RequestError == "" {
		out.Cards = n
	}
	return out
}

// sumUp sets the sum of the nodes with cards, in a common unit: theirs if it is the same, otherwise MiB. Nodes without cards get this unit.
func (r *Report) sumUp() {
	sum := &r.Cluster
	for _, node := range r.Nodes {
		switch {
		case len(node.Cards) == 0:
		case sum.Unit == 0:
			sum.Unit = node.Unit
		case sum.Unit != node.Unit:
			sum.Unit = gpu.MiB
		}
	}
	if sum.Unit == 0 && len(r.Nodes) > 0 {
		sum.Unit = gpu.GiB
	}
	for i := range r.Nodes {
		node := &r.Nodes[i]
		if len(node.Cards) == 0 {
			node.Unit = sum.Unit
			continue
		}
		sum.Allocated = sum.Allocated.Add(convert(node.Allocated, node.Unit, sum.Unit))
		sum.Total = sum.Total.Add(convert(node.Total, node.Unit, sum.Unit))
		sum.Free = sum.Free.Add(convert(node.Free, node.Unit, sum.Unit))
		sum.LargestFree = max(sum.LargestFree, convert(node.LargestFree, node.Unit, sum.Unit))
	}
	sum.Percent = percent(sum.Allocated, sum.Total)
}

// convert converts memory to a smaller unit. It saturates.
func convert(memory gpu.Memory, from, to gpu.Unit) gpu.Memory {
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

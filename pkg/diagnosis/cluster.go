package diagnosis

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// NewLedger returns the ledger that the objects make up: what the extender's ledger has, except for binds that the API server
// hasn't confirmed yet and for what is reserved for items that wait. A pod whose annotations name no card counts on the card on
// which its node is likely to place it. It serves programs that read only the API server.
func NewLedger(nodes []*corev1.Node, pods []*corev1.Pod) *ledger.Ledger {
	l := ledger.New()
	for _, object := range nodes {
		if spec, shares := eligibility.Spec(object, protocol.ParseNode(object)); shares {
			l.SetNode(object.Name, spec)
		}
	}
	for _, object := range pods {
		pod := protocol.Pod(object)
		switch {
		case pod.Request == 0 || protocol.Terminal(object):
		case object.Spec.NodeName != "":
			where, _ := protocol.PodPlacement(object)
			assignment, _ := protocol.ParseAssignment(object.Annotations)
			l.SetBound(object.Spec.NodeName, pod, where, assignment.AssumeTime)
		case object.Status.NominatedNodeName != "" && !pod.Leaving:
			l.Nominate(object.Status.NominatedNodeName, pod)
		}
	}
	return l
}

// Nodes returns the nodes of a ledger for a Diagnoser. object returns a node's object; a node without one is left out.
// deletion returns when the deletion of a terminating pod was requested and when its grace period ends; zero if unknown.
func Nodes(l *ledger.Ledger, object func(name string) (*corev1.Node, bool), deletion func(pod gpu.Pod) (since, due time.Time)) []Node {
	cards := l.NodeCards()
	nodes := make([]Node, 0, len(cards))
	for i := range cards {
		n := &cards[i]
		o, ok := object(n.Name)
		if !ok {
			continue
		}
		node := Node{
			Node: eligibility.Node{Object: o, Support: n.Support, Closed: n.Closed}, Unit: n.Unit, Cards: n.Cards,
			Requested: n.Requested, Nominees: n.Nominees,
		}
		for _, allocation := range n.Leaving {
			since, due := deletion(allocation.Pod)
			node.Terminating = append(node.Terminating, Terminating{allocation.Pod, allocation.Placement, since, due})
		}
		nodes = append(nodes, node)
	}
	return nodes
}

// FromObjects returns a Diagnoser for the state that the objects of the API server show, see NewLedger. nodes and pods are all
// that the caller may read. What only the extender that leads knows appears in other words:
//
//   - Memory that is assumed for a pod or a group, and not bound yet, looks free: instead of Full the diagnosis is Fits, and says
//     that kube-scheduler found no room at its last try.
//   - That memory is reserved for an item that came first is known from kube-scheduler's message, here as in the extender.
//   - A pod for which the extender itself evicts (--evict-fragmented) is nominated only once kube-scheduler says so. Until then
//     it waits for the pods that are being deleted.
func FromObjects(nodes []*corev1.Node, pods []*corev1.Pod, now time.Time) *Diagnoser {
	byName := make(map[string]*corev1.Node, len(nodes))
	for _, node := range nodes {
		byName[node.Name] = node
	}
	deletions := map[gpu.PodUID]*corev1.Pod{}
	var pending []*Pod
	for _, pod := range pods {
		switch {
		case pod.DeletionTimestamp != nil:
			deletions[gpu.PodUID(pod.UID)] = pod
		case pod.Spec.NodeName == "" && !protocol.Terminal(pod) && protocol.PodRequest(pod) > 0:
			pending = append(pending, NewPod(pod))
		}
	}
	object := func(name string) (*corev1.Node, bool) {
		node, ok := byName[name]
		return node, ok
	}
	deletion := func(pod gpu.Pod) (since, due time.Time) {
		deleted, ok := deletions[pod.UID]
		if !ok {
			return
		}
		due = deleted.DeletionTimestamp.Time
		if grace := deleted.DeletionGracePeriodSeconds; grace != nil {
			return due.Add(-time.Duration(*grace) * time.Second), due
		}
		return due, due
	}
	return NewDiagnoser(Nodes(NewLedger(nodes, pods), object, deletion), pending, now)
}

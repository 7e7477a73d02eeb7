package eligibility

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Node is what decides which pods can use a node that shares its cards.
type Node struct {
	// Object is the Node object. Its name, labels and taints are used.
	Object *corev1.Node
	// Support is what the node can give to pods.
	placement.Support
	// Closed is the first reason why no new pod can run on the node, see the function Closed; empty if pods can.
	Closed string
}

// Exclusion is why a pod can't use a node, independent of what its cards have free; the zero value if it can.
type Exclusion struct {
	// ByConstraints is true if the pod's node selector or node affinity excludes the node.
	ByConstraints bool
	// Reason is what the node lacks.
	Reason string
	// Key, Value and Effect are those of a taint that the pod doesn't tolerate.
	Key, Value string
	Effect     corev1.TaintEffect
}

// Exclusion returns why a pod with the constraints can't use the node.
func (n *Node) Exclusion(c *Constraints) Exclusion {
	if ok, err := c.affinity.Match(n.Object); err != nil || !ok {
		return Exclusion{ByConstraints: true}
	}
	if n.Closed != "" && !c.toleratesClosed(n.Closed) {
		return Exclusion{Reason: n.Closed}
	}
	if reason := n.Accepts(&c.demand); reason != reasons.Fits {
		return Exclusion{Reason: reason.Text()}
	}
	taint, untolerated := schedulinghelper.FindMatchingUntoleratedTaint(klog.Background(), n.Object.Spec.Taints, c.tolerations,
		func(t *corev1.Taint) bool { return t.Effect != corev1.TaintEffectPreferNoSchedule }, true)
	if untolerated {
		return Exclusion{Key: taint.Key, Value: taint.Value, Effect: taint.Effect}
	}
	return Exclusion{}
}

// Admits reports whether pods with the constraints can use the node. c may be nil: then none can.
func (n *Node) Admits(c *Constraints) bool { return c != nil && n.Exclusion(c) == Exclusion{} }

// NominationValid reports whether the nomination to the node of a pod with the constraints is still valid: the node admits the pod, and the
// pod fits its cards or, if leaving is true, a pod of lower priority is about to end there. kube-scheduler doesn't always clear an invalid
// nomination: nominatedNodeName stays if its dry run needs no victims (k8s.io/kubernetes pkg/scheduler/framework/preemption, Preempt).
func (n *Node) NominationValid(c *Constraints, cards []placement.Card, demand gpu.Demand, leaving bool) bool {
	return n.Admits(c) && (leaving || placement.Fit(cards, demand) == reasons.Fits)
}

// Spec returns what the ledger keeps of a node; false if the node shares no cards and has no label for it, right or wrong. node is what protocol.ParseNode
// returns for the object.
func Spec(object *corev1.Node, node protocol.Node) (spec ledger.NodeSpec, shares bool) {
	label, labelled := protocol.SharingLabel(object)
	unread := protocol.UnreadLabel(object)
	if len(node.Cards) == 0 && !node.WholeCards && !labelled && unread == "" {
		return ledger.NodeSpec{}, false
	}
	spec = ledger.NodeSpec{
		Unit: node.Unit, Cards: node.Cards, WholeCards: node.WholeCards, Isolation: node.Isolation, Simulated: node.Simulated, Pool: protocol.PoolOf(object),
	}
	spec.Limits.Unit = max(node.Unit, 0)
	for _, card := range node.Cards {
		spec.Limits.Card = max(spec.Limits.Card, node.Unit.Bytes(card.Memory))
	}
	rules, lacks := protocol.RulesOfIsolation(node.Isolation), func(feature string) bool { return !slices.Contains(node.Features, feature) }
	adapter := slices.ContainsFunc(node.Cards, func(c gpu.Card) bool { return c.RDMAPorts != "" })
	for _, obstacle := range []struct { // Of two for the same pods, the last one is reported.
		exists bool
		to     *reasons.Reason
		reason reasons.Reason
	}{
		{rules.OneCard, &spec.SeveralCards, reasons.OneCardOnly},
		{rules.NoOwnSharedMemory, &spec.SharedMemory, reasons.NoOwnSharedMemory},
		{rules.NoLimitAboveRequest, &spec.Limits.Refused, reasons.NoLimitAboveRequest},
		{lacks(protocol.FeatureCards), &spec.SeveralCards, reasons.OldForCards},
		{lacks(protocol.FeatureCores), &spec.Cores, reasons.OldForCores},
		{lacks(protocol.FeatureLimits), &spec.Limits.Refused, reasons.OldForLimits},
		{!adapter, &spec.RDMA, reasons.NoAdapter},
		{lacks(protocol.FeatureRDMA), &spec.RDMA, reasons.OldForRDMA},
	} {
		if obstacle.exists {
			*obstacle.to = obstacle.reason
		}
	}
	spec.Problems = Closed(object, node)
	if len(spec.Problems) > 0 {
		spec.Closed = spec.Problems[0].Text
	}
	if node.Problem != nil {
		spec.Problems = append(spec.Problems, reasons.NewNodeProblem(reasons.NodeInventory, "%v", node.Problem))
	}
	if len(node.Cards) == 0 && labelled {
		usual := ""
		if slices.Contains([]string{"True", "TRUE", "yes", "on", "1"}, label) { // Other values are names of releases.
			usual = fmt.Sprintf("; the chart's device plugin runs on nodes with %s=true", protocol.LabelShared)
		}
		spec.Problems = append(spec.Problems, reasons.NewNodeProblem(reasons.NodeWithoutCards,
			"the label %s=%s is set, but the node has no cards to share: its device plugin reports none%s", protocol.LabelShared, label, usual))
	}
	if unread != "" {
		spec.Problems = append(spec.Problems, reasons.NodeProblem{Kind: reasons.NodeUnreadLabel, Text: unread})
	}
	return spec, true
}

const (
	cordoned = "the node is cordoned"
	notReady = "the node is not ready"
)

// Closed returns the reasons why no new pod can run on a node that shares its cards, independent of its free memory: first those that no pod tolerates.
// It depends on the node's resources, its conditions and on whether it is cordoned, and on parsed, which is what protocol.ParseNode returns for the node.
func Closed(node *corev1.Node, parsed protocol.Node) (closed []reasons.NodeProblem) {
	add := func(kind reasons.NodeProblemKind, text string) {
		closed = append(closed, reasons.NodeProblem{Kind: kind, Text: text})
	}
	if parsed.WholeCards {
		add(reasons.NodeWholeCards, reasons.WholeCards.Text())
	}
	unhealthy := len(parsed.Cards) > 0 && !slices.ContainsFunc(parsed.Cards, gpu.Card.Healthy)
	if disconnected(node) && !unhealthy { // Of unhealthy cards nothing is allocatable, whether the plugin is connected or not.
		add(reasons.NodeWithoutPlugin, "the device plugin is not connected: nothing of "+string(protocol.ResourceMemory)+" is allocatable")
	}
	if !ready(node) {
		add(reasons.NodeNotReady, notReady)
	}
	if node.Spec.Unschedulable {
		add(reasons.NodeCordoned, cordoned)
	}
	return closed
}

func ready(node *corev1.Node) bool {
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return true // No Ready condition yet.
}

// disconnected reports whether the device plugin is not connected to the kubelet. In that case allocatable becomes zero at
// once, and capacity some minutes later.
func disconnected(node *corev1.Node) bool {
	capacity := node.Status.Capacity[protocol.ResourceMemory]
	allocatable, known := node.Status.Allocatable[protocol.ResourceMemory]
	_, announced := node.Annotations[protocol.AnnotationInventory]
	return known && allocatable.IsZero() && (announced || !capacity.IsZero())
}

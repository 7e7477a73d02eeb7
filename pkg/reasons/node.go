package reasons

import "fmt"

// NodeProblemKind is what is wrong with a node, in a few kinds for metrics.
type NodeProblemKind uint8

// The kinds, in the order in which views list the problems of a node.
const (
	// NodeGone: pods are bound to the node, whose Node object doesn't exist.
	NodeGone NodeProblemKind = iota
	// NodeWholeCards is WholeCards.
	NodeWholeCards
	// NodeNotReady: the kubelet doesn't report that the node is ready.
	NodeNotReady
	// NodeWithoutPlugin: the node's device plugin is not connected to the kubelet.
	NodeWithoutPlugin
	// NodeCordoned: kube-scheduler puts no new pods on the node.
	NodeCordoned
	// NodeInventory: the inventory can't be read, or contradicts the node's capacity.
	NodeInventory
	// NodeWithoutCards: the node has the label for sharing and no cards.
	NodeWithoutCards
	// NodeUnreadLabel: a label of the node was probably meant for gpushare, which doesn't read it.
	NodeUnreadLabel
	// NodeUnhealthyCard: a card is unhealthy.
	NodeUnhealthyCard
	// NodeOverfullCard: pods hold more of a card than it has.
	NodeOverfullCard
	// NodeUnknownCard: pods hold memory on cards that are unknown, or that the node doesn't report.
	NodeUnknownCard
)

var nodeProblemLabels = [...]string{
	NodeGone: "gone", NodeWholeCards: "whole_cards", NodeNotReady: "not_ready", NodeWithoutPlugin: "without_plugin", NodeCordoned: "cordoned",
	NodeInventory: "inventory", NodeWithoutCards: "without_cards", NodeUnreadLabel: "unread_label", NodeUnhealthyCard: "unhealthy_card", NodeOverfullCard: "overfull_card",
	NodeUnknownCard: "unknown_card",
}

// String returns the kind's label for metrics.
func (k NodeProblemKind) String() string { return nodeProblemLabels[k] }

// NodeProblemKinds returns all kinds.
func NodeProblemKinds() []NodeProblemKind {
	kinds := make([]NodeProblemKind, len(nodeProblemLabels))
	for i := range kinds {
		kinds[i] = NodeProblemKind(i)
	}
	return kinds
}

// NodeProblem is something that is wrong with a node. Text says it to people, without the node's name.
type NodeProblem struct {
	Kind NodeProblemKind
	Text string
}

// NewNodeProblem returns a problem with the formatted text.
func NewNodeProblem(kind NodeProblemKind, format string, args ...any) NodeProblem {
	return NodeProblem{kind, fmt.Sprintf(format, args...)}
}

package waiting

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Closed returns the reasons for which no pod can go to a node that shares its cards, whatever is free there. Read of
// the node are its resources, its conditions and whether it is cordoned; wholeCards is protocol.Node's.
func Closed(node *corev1.Node, wholeCards bool) []string {
	var reasons []string
	if wholeCards {
		reasons = append(reasons, placement.WholeCards.String())
	}
	if !ready(node) {
		reasons = append(reasons, "the node is not ready")
	}
	if node.Spec.Unschedulable {
		reasons = append(reasons, "the node is cordoned")
	}
	if Disconnected(node) {
		reasons = append(reasons, "the device plugin is not connected: nothing of "+string(protocol.ResourceMemory)+" is allocatable")
	}
	return reasons
}

func ready(node *corev1.Node) bool {
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return true // Nobody has said otherwise.
}

// Disconnected reports whether the kubelet has lost the device plugin: allocatable goes to zero at once, capacity some
// minutes later.
func Disconnected(node *corev1.Node) bool {
	capacity := node.Status.Capacity[protocol.ResourceMemory]
	allocatable, known := node.Status.Allocatable[protocol.ResourceMemory]
	_, announced := node.Annotations[protocol.AnnotationInventory]
	return known && allocatable.IsZero() && (announced || !capacity.IsZero())
}

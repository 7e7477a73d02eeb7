package diagnosis

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Closed returns the reasons why no new pod can run on a node that shares its cards, independent of its free memory. It
// depends on the node's resources, its conditions and on whether it is cordoned. wholeCards is protocol.Node.WholeCards.
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
	return true // No Ready condition yet.
}

// Disconnected reports whether the device plugin is not connected to the kubelet. In that case allocatable becomes zero at
// once, and capacity some minutes later.
func Disconnected(node *corev1.Node) bool {
	capacity := node.Status.Capacity[protocol.ResourceMemory]
	allocatable, known := node.Status.Allocatable[protocol.ResourceMemory]
	_, announced := node.Annotations[protocol.AnnotationInventory]
	return known && allocatable.IsZero() && (announced || !capacity.IsZero())
}

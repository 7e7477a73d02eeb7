package clustercache

import (
	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/protocol"
)

// Resources are the resources that a decision about nodes counts. The amounts have the same order: CPU in thousandths,
// everything else in the resource's own unit.
type Resources []corev1.ResourceName

// maxAmount keeps the sums over a node's pods within 64 bits, for any requests.
const maxAmount = 1 << 52

// Amounts returns the amounts in the list.
func (r Resources) Amounts(list corev1.ResourceList) []int64 {
	out := make([]int64, len(r))
	for i, name := range r {
		out[i] = amountOf(name, list)
	}
	return out
}

// Uses returns what the pod uses of its node.
func (r Resources) Uses(pod *PodInfo) []int64 {
	out := make([]int64, len(r))
	for i := range r {
		out[i] = r.Use(i, pod)
	}
	return out
}

// Use is Uses for one resource.
func (r Resources) Use(i int, pod *PodInfo) int64 {
	switch name := r[i]; name {
	case protocol.ResourceMemory:
		return int64(min(pod.Request, maxAmount))
	case corev1.ResourcePods:
		return 1
	default:
		return amountOf(name, pod.Requests)
	}
}

func amountOf(name corev1.ResourceName, list corev1.ResourceList) int64 {
	quantity := list[name]
	switch {
	case quantity.CmpInt64(maxAmount) >= 0:
		return maxAmount
	case name == corev1.ResourceCPU:
		return min(quantity.MilliValue(), maxAmount)
	}
	return quantity.Value()
}

// CountsFor reports whether the pod, which is on a node or nominated to it, counts there for another pod.
// kube-scheduler counts nominated pods of equal or higher priority (k8s.io/kubernetes
// pkg/scheduler/framework/runtime/framework.go, addGENominatedPods).
func (p *PodInfo) CountsFor(other *PodInfo) bool {
	return p.Node != "" || p.UID != other.UID && p.Priority >= other.Priority
}

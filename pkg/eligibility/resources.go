package eligibility

import (
	"fmt"
	"iter"
	"maps"
	"unique"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// PodUse is which nodes a pod can use, and what it uses of its node until it has ended. It is never changed after it was built.
type PodUse struct {
	gpu.Pod
	Node string
	// NominatedNode is status.nominatedNodeName; empty if Node is set.
	NominatedNode string
	// Requests is what the pod uses of its node, as kube-scheduler counts it, without GPU memory, which is Request.
	Requests Amounts
	// Constraints is ConstraintsOf a pod that asks for GPU memory and hasn't ended; the zero value for other pods.
	Constraints unique.Handle[string]
}

// pending reports whether the pod, which hasn't ended, still needs a node with GPU memory.
func (p *PodUse) pending() bool { return p.Node == "" && !p.Leaving && p.Request > 0 }

// CountsFor reports whether the pod, which is on a node or nominated to it, counts there for another pod.
// kube-scheduler counts nominated pods of equal or higher priority (k8s.io/kubernetes
// pkg/scheduler/framework/runtime/framework.go, addGENominatedPods).
func (p *PodUse) CountsFor(other *PodUse) bool {
	return p.Node != "" || p.UID != other.UID && p.Priority >= other.Priority
}

// Shape returns what the pod asks for of its node.
func (p *PodUse) Shape() placement.Shape {
	shape := placement.Shape{Demand: p.Demand(), Constraints: p.Constraints, NodeResources: placement.NodeResources{
		CPU: p.Requests[corev1.ResourceCPU], NodeMemory: p.Requests[corev1.ResourceMemory],
	}}
	if p.Request == 0 {
		shape.Demand = gpu.Demand{}
	}
	return shape
}

// OtherRequests returns a text that is equal for pods that ask for the same of what Shape doesn't have; empty if that is nothing.
func (p *PodUse) OtherRequests() string {
	others := maps.Clone(p.Requests)
	delete(others, corev1.ResourceCPU)
	delete(others, corev1.ResourceMemory)
	if len(others) == 0 {
		return ""
	}
	return fmt.Sprint(others) // It is sorted.
}

// Amounts are amounts of resources: CPU in thousandths, everything else in the resource's own unit. Many pods share one value, which is never
// changed.
type Amounts map[corev1.ResourceName]int64

// maxAmount keeps the sums over a node's pods within 64 bits, for any requests.
const maxAmount = 1 << 52

// AmountsOf returns the amounts in the list.
func AmountsOf(list corev1.ResourceList) Amounts {
	out := make(Amounts, len(list))
	for name, quantity := range list {
		switch {
		case quantity.CmpInt64(maxAmount) >= 0:
			out[name] = maxAmount
		case name == corev1.ResourceCPU:
			out[name] = min(quantity.MilliValue(), maxAmount)
		default:
			out[name] = quantity.Value()
		}
	}
	return out
}

// uses returns what the pod uses of its node by resource, without GPU memory.
func (p *PodUse) uses() iter.Seq2[corev1.ResourceName, int64] {
	return func(yield func(corev1.ResourceName, int64) bool) {
		if yield(corev1.ResourcePods, 1) {
			maps.All(p.Requests)(yield)
		}
	}
}

// Use returns what the pod uses of a resource of its node.
func (p *PodUse) Use(name corev1.ResourceName) int64 {
	switch name {
	case protocol.ResourceMemory:
		return int64(min(p.Request, maxAmount))
	case corev1.ResourcePods:
		return 1
	}
	return p.Requests[name]
}

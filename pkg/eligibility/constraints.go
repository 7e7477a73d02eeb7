package eligibility

import (
	"fmt"
	"slices"
	"strings"
	"unique"

	corev1 "k8s.io/api/core/v1"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Constraints are what a pod requires of nodes, independent of what their cards have free. Only the text that ConstraintsOf returns is kept of
// a pod; Parse parses it.
type Constraints struct {
	// NodeSelector, Affinity and tolerations are those of the pod's spec. Affinity has only what the pod requires of nodes; nil if that is
	// nothing. affinity is the same as the first two, for matching.
	NodeSelector map[string]string
	Affinity     *corev1.NodeSelector
	tolerations  []corev1.Toleration
	affinity     nodeaffinity.RequiredNodeAffinity
	// demand has what a node must support whatever its cards have free (placement.Support): two cards if the pod asks for several, one core if it asks for
	// any, shared memory, adapters if they are required, limits.
	demand gpu.Demand
}

// ConstraintsOf returns a text that is equal for pods that can use the same nodes, independent of free resources. The pod may be bound: then
// the cards that it has count instead of its label, which users can change. Of a pod that may be too large it needs the outline.
func ConstraintsOf(pod *corev1.Pod) unique.Handle[string] {
	spec := corev1.PodSpec{NodeSelector: pod.Spec.NodeSelector, Tolerations: pod.Spec.Tolerations}
	if pod.Spec.Affinity != nil && pod.Spec.Affinity.NodeAffinity != nil {
		spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution,
		}}
	}
	text, _ := spec.Marshal() // It returns no error.
	p := protocol.Pod(pod)
	if pod.Spec.NodeName != "" {
		where, _ := protocol.PodPlacement(pod) // None counts as one card.
		p.Cards = len(where)
	}
	demand := p.Demand()
	if demand.RDMA != gpu.RDMARequired {
		demand.RDMA = gpu.RDMANone
	}
	return unique.Make(fmt.Sprintf("%d %d %t %d %d/%d %s", min(demand.Cards, 2), min(demand.Cores, 1), demand.SharedMemory, demand.RDMA,
		demand.Limits.Largest, demand.Limits.MaxUnit, text))
}

// Parse parses what ConstraintsOf returned. It returns nil for any other text: then the pod can use no node.
func Parse(constraints unique.Handle[string]) *Constraints {
	if constraints == (unique.Handle[string]{}) {
		return nil
	}
	parts := strings.SplitN(constraints.Value(), " ", 6)
	if len(parts) < 6 {
		return nil
	}
	var spec corev1.PodSpec
	if err := spec.Unmarshal([]byte(parts[5])); err != nil {
		return nil
	}
	c := &Constraints{
		NodeSelector: spec.NodeSelector, tolerations: spec.Tolerations,
		affinity: nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: spec}),
	}
	d := &c.demand
	_, err := fmt.Sscanf(constraints.Value(), "%d %d %t %d %d/%d", &d.Cards, &d.Cores, &d.SharedMemory, &d.RDMA, &d.Limits.Largest, &d.Limits.MaxUnit)
	if err != nil {
		return nil
	}
	if spec.Affinity != nil && spec.Affinity.NodeAffinity != nil {
		c.Affinity = spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	}
	return c
}

// toleratesClosed reports whether the pod can use nodes that are closed for this reason: cordoned ones, as pods of a DaemonSet can
// (k8s.io/kubernetes pkg/scheduler/framework/plugins/nodeunschedulable), or such that aren't ready, which kube-scheduler knows by
// their taints alone. If the node has further taints, these are checked too.
func (c *Constraints) toleratesClosed(reason string) bool {
	var taints []string
	switch reason {
	case cordoned:
		taints = []string{corev1.TaintNodeUnschedulable}
	case notReady:
		taints = []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable}
	}
	return slices.ContainsFunc(taints, func(key string) bool {
		taint := &corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule}
		return schedulinghelper.TolerationsTolerateTaint(klog.Background(), c.tolerations, taint, true)
	})
}

// requiredTerms returns the terms of the required node affinity, of which a node has to match one.
func (c *Constraints) requiredTerms() []corev1.NodeSelectorTerm {
	if c.Affinity == nil {
		return nil
	}
	return c.Affinity.NodeSelectorTerms
}

// PinnedTo returns the names of the only nodes that the constraints admit; nil if they don't name their nodes.
func (c *Constraints) PinnedTo() (all []string) {
	terms := c.requiredTerms()
	for i := range terms {
		names := pinnedNames(&terms[i])
		if names == nil {
			return nil
		}
		all = append(all, names...)
	}
	return all
}

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
	// selector, terms and tolerations are those of the pod's spec. A node has to match one of the terms, those of the required node affinity.
	// affinity is the same as the first two, for matching.
	selector    map[string]string
	terms       []corev1.NodeSelectorTerm
	tolerations []corev1.Toleration
	affinity    nodeaffinity.RequiredNodeAffinity
	// demand has what a node must support whatever its cards have free (placement.Support): several cards, cores, shared memory, adapters, limits.
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
	text, err := spec.Marshal()
	if err != nil { // Unreachable.
		return unique.Make(string(pod.UID))
	}
	p := protocol.Pod(pod)
	if pod.Spec.NodeName != "" {
		where, _ := protocol.PodPlacement(pod) // None counts as one card.
		p.Cards = len(where)
	}
	d := p.Demand()
	rdma := d.RDMA &^ gpu.RDMAPreferred // A preference excludes no node.
	return unique.Make(fmt.Sprintf(supportFormat, min(d.Cards, 2), min(d.Cores, 1), d.SharedMemory, rdma, d.Limits.Largest, d.Limits.MaxUnit) + "\n" + string(text))
}

// supportFormat is the format of what a node must support; the marshalled spec follows in the next line.
const supportFormat = "%d %d %t %d %d %d"

// Parse parses what ConstraintsOf returned. It returns nil for any other text: then the pod can use no node.
func Parse(constraints unique.Handle[string]) *Constraints {
	if constraints == (unique.Handle[string]{}) {
		return nil
	}
	support, text, _ := strings.Cut(constraints.Value(), "\n")
	var c Constraints
	d := &c.demand
	if _, err := fmt.Sscanf(support, supportFormat, &d.Cards, &d.Cores, &d.SharedMemory, &d.RDMA, &d.Limits.Largest, &d.Limits.MaxUnit); err != nil {
		return nil
	}
	var spec corev1.PodSpec
	if err := spec.Unmarshal([]byte(text)); err != nil {
		return nil
	}
	c.selector, c.tolerations, c.affinity = spec.NodeSelector, spec.Tolerations, nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: spec})
	if spec.Affinity != nil && spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		c.terms = spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	}
	return &c
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

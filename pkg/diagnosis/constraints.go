package diagnosis

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"unique"

	corev1 "k8s.io/api/core/v1"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// constraints are what a pod requires of nodes, independent of what their cards have free. Only the text that Constraints returns is kept of a
// pod; it is parsed where it is used.
type constraints struct {
	// spec has the node selector, the required node affinity and the tolerations. affinity is the same as the first two, for matching.
	spec     corev1.PodSpec
	affinity nodeaffinity.RequiredNodeAffinity
	// demand has what a node must support whatever its cards have free (placement.Support): several cards, cores, shared memory.
	demand gpu.Demand
}

// constraintsText returns the text that parseConstraints parses.
func constraintsText(demand gpu.Demand, spec []byte) string {
	return fmt.Sprintf("%t %t %t %s", demand.Cards > 1, demand.Cores > 0, demand.SharedMemory, spec)
}

// parseConstraints parses what Constraints returned. It returns nil if the text can't be parsed.
func parseConstraints(text unique.Handle[string]) *constraints {
	parts := strings.SplitN(text.Value(), " ", 4)
	if len(parts) < 4 {
		return nil
	}
	c := &constraints{demand: gpu.Demand{Cards: 1, SharedMemory: parts[2] == "true"}}
	if parts[0] == "true" {
		c.demand.Cards = 2
	}
	if parts[1] == "true" {
		c.demand.Cores = 1
	}
	if err := c.spec.Unmarshal([]byte(parts[3])); err != nil {
		return nil
	}
	c.affinity = nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: c.spec})
	return c
}

// toleratesClosed reports whether the pod can use nodes that are closed for this reason: cordoned ones, as pods of a DaemonSet can
// (k8s.io/kubernetes pkg/scheduler/framework/plugins/nodeunschedulable), or such that aren't ready, which kube-scheduler knows by
// their taints alone. If the node has further taints, these are checked too.
func (c *constraints) toleratesClosed(reason string) bool {
	var taints []string
	switch reason {
	case cordoned:
		taints = []string{corev1.TaintNodeUnschedulable}
	case notReady:
		taints = []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable}
	}
	return slices.ContainsFunc(taints, func(key string) bool {
		taint := &corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule}
		return schedulinghelper.TolerationsTolerateTaint(klog.Background(), c.spec.Tolerations, taint, true)
	})
}

// excludes returns by which of the constraints a node is excluded that the affinity doesn't match.
func (c *constraints) excludes() string {
	selector, affinity := c.spec.NodeSelector, c.spec.Affinity != nil
	var shown []string
	for _, key := range slices.Sorted(maps.Keys(selector)) {
		if shown = append(shown, key+"="+selector[key]); len(shown) == maxNames {
			break
		}
	}
	text := listed([]string{strings.Join(shown, ",")}, 1+len(selector)-len(shown))
	switch {
	case len(selector) > 0 && affinity:
		return fmt.Sprintf("excluded by the pod's node selector (%s) or its node affinity", text)
	case affinity:
		return "excluded by the pod's node affinity"
	default:
		return fmt.Sprintf("excluded by the pod's node selector (%s)", text)
	}
}

// requiredTerms returns the terms of the required node affinity, of which a node has to match one.
func (c *constraints) requiredTerms() []corev1.NodeSelectorTerm {
	if c.spec.Affinity == nil || c.spec.Affinity.NodeAffinity == nil ||
		c.spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	return c.spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
}

// pinnedTo returns the names of the only nodes that the constraints admit; nil if they don't name their nodes.
func (c *constraints) pinnedTo() (all []string) {
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

package eviction

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// keptApart reports whether required anti-affinity or a host port keeps the pod off the node even when the victims are gone. It lists the node's pods
// only if one of them, or the pod, has such a rule, or the pod uses host ports.
func (r *Reclaimer) keptApart(ctx context.Context, pod *corev1.Pod, node string, victims map[gpu.PodUID]bool) (bool, error) {
	hasRule := func(p *clustercache.PodInfo) bool { return p.Node != "" && p.Conflicts.RequiredAntiAffinity }
	own := clustercache.NewPodInfo(pod).Conflicts
	if !own.RequiredAntiAffinity && len(own.HostPorts) == 0 && !slices.ContainsFunc(r.Cache.PodsOn(node), hasRule) {
		return false, nil
	}
	others, err := r.API.PodsOn(ctx, node)
	if err != nil {
		return false, fmt.Errorf("listing the pods of node %s: %w", node, err)
	}
	object, known := r.Cache.Node(node)
	if !known {
		return false, nil
	}
	return slices.ContainsFunc(others, func(other corev1.Pod) bool {
		stays := !victims[gpu.PodUID(other.UID)] && other.DeletionTimestamp == nil && !protocol.Terminal(&other)
		return stays && (keepsOff(pod, &other, object) || keepsOff(&other, pod, object) || own.PortsConflict(&clustercache.NewPodInfo(&other).Conflicts))
	}), nil
}

// keepsOff reports whether a rule of the pod certainly keeps the other one off the node (k8s.io/kubernetes
// pkg/scheduler/framework/plugins/interpodaffinity). A rule for namespaces by their labels may do so or not.
func keepsOff(pod, other *corev1.Pod, node *corev1.Node) bool {
	return slices.ContainsFunc(antiAffinity(pod), func(term corev1.PodAffinityTerm) bool {
		selector, err := metav1.LabelSelectorAsSelector(term.LabelSelector)
		if _, inTopology := node.Labels[term.TopologyKey]; err != nil || !inTopology || !selector.Matches(labels.Set(other.Labels)) {
			return false
		}
		if term.NamespaceSelector != nil && len(term.NamespaceSelector.MatchLabels)+len(term.NamespaceSelector.MatchExpressions) == 0 {
			return true
		}
		own := len(term.Namespaces) == 0 && term.NamespaceSelector == nil && other.Namespace == pod.Namespace
		return own || slices.Contains(term.Namespaces, other.Namespace)
	})
}

// antiAffinity returns the rules of the pod about the pods that may not run near it.
func antiAffinity(pod *corev1.Pod) []corev1.PodAffinityTerm {
	if pod.Spec.Affinity == nil || pod.Spec.Affinity.PodAntiAffinity == nil {
		return nil
	}
	return pod.Spec.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution
}

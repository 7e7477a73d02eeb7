package eviction

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/component-helpers/storage/ephemeral"
	"k8s.io/component-helpers/storage/volume"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// usableNodes reads a pod that waits. It returns those of its nodes that it can use: none if it doesn't wait any more or lacks a volume; those that
// reach its volumes; and not this one if required anti-affinity or a host port keeps it off.
func (r *Reclaimer) usableNodes(ctx context.Context, pod reclaim.Pod, node string, victims map[gpu.PodUID]bool) (nodes []string, err error) {
	live, err := r.readUnbound(ctx, pod.Pod)
	if errors.Is(err, errOutdated) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	volumes, exist, err := r.volumes(ctx, live)
	if err != nil || !exist {
		return nil, err
	}
	apart, err := r.keptApart(ctx, live, node, victims)
	return slices.DeleteFunc(slices.Clone(pod.Nodes), func(name string) bool { return apart && name == node || r.outOfReach(volumes, name) }), err
}

// maxClaims limits the claims of a pod that are read before evictions, because other tenants wait for the reads. Further ones are ignored: pods can be
// evicted for a pod that they keep off the node.
const maxClaims = 16

// volumes reads the volumes to which the claims of the pod are bound. exist is false if a claim or its volume is missing or is about to be: kube-scheduler
// doesn't place the pod then (k8s.io/kubernetes pkg/scheduler/framework/plugins/volumebinding, podHasPVCs).
func (r *Reclaimer) volumes(ctx context.Context, pod *corev1.Pod) (volumes []*corev1.PersistentVolume, exist bool, err error) {
	claims := 0
	for i := range pod.Spec.Volumes {
		name := claimName(pod, &pod.Spec.Volumes[i])
		if name == "" {
			continue
		}
		if claims++; claims > maxClaims {
			break
		}
		var bound *corev1.PersistentVolume
		claim, err := r.API.Claim(ctx, pod.Namespace, name)
		if err == nil && claim.Spec.VolumeName != "" {
			bound, err = r.API.Volume(ctx, claim.Spec.VolumeName)
		}
		switch {
		case apierrors.IsNotFound(err):
			return nil, false, nil
		case err != nil:
			return nil, false, fmt.Errorf("reading claim %s/%s and its volume: %w", pod.Namespace, name, err)
		case claim.DeletionTimestamp != nil, claim.Status.Phase == corev1.ClaimLost:
			return nil, false, nil
		case bound != nil:
			volumes = append(volumes, bound)
		}
	}
	return volumes, true, nil
}

// claimName returns the name of the claim of one of the pod's volumes; empty if it has none.
func claimName(pod *corev1.Pod, v *corev1.Volume) string {
	switch {
	case v.PersistentVolumeClaim != nil:
		return v.PersistentVolumeClaim.ClaimName
	case v.Ephemeral != nil:
		return ephemeral.VolumeClaimName(pod, v)
	}
	return ""
}

// outOfReach reports whether one of the volumes can't be used on the node, such as one of another zone.
func (r *Reclaimer) outOfReach(volumes []*corev1.PersistentVolume, node string) bool {
	return slices.ContainsFunc(volumes, func(v *corev1.PersistentVolume) bool {
		object, known := r.Cache.Node(node)
		return known && volume.CheckNodeAffinity(v, object.Labels) != nil
	})
}

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

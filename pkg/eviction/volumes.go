package eviction

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/component-helpers/storage/ephemeral"
	"k8s.io/component-helpers/storage/volume"
)

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
	object, known := r.Cache.Node(node)
	return known && slices.ContainsFunc(volumes, func(v *corev1.PersistentVolume) bool {
		return volume.CheckNodeAffinity(v, object.Labels) != nil
	})
}

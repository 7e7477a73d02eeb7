package protocol

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// OverdueMargin is how long a pod may exist after the end of its grace period. The kubelet then kills the containers,
// unmounts the volumes and updates the status, which takes seconds.
const OverdueMargin = time.Minute

// Overdue reports whether the pod still exists well after its deletion deadline: its containers don't end (the driver hangs),
// its node is down, or a finalizer stays. This can last, so its memory is not expected to become free. The deletion timestamp
// is the end of the grace period (k8s.io/apimachinery pkg/apis/meta/v1, ObjectMeta).
func Overdue(pod *corev1.Pod, now time.Time) bool {
	return pod.DeletionTimestamp != nil && now.Sub(pod.DeletionTimestamp.Time) > OverdueMargin
}

// IsMirror reports whether the pod mirrors a static pod. Its deletion ends no container, and the kubelet creates it again.
func IsMirror(pod *corev1.Pod) bool {
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return mirror
}

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

// TerminatingPriorities returns the priorities of the given pods that hold GPU memory, are being deleted and are not
// overdue. Their memory should become free soon.
func TerminatingPriorities(pods []*corev1.Pod, now time.Time) []int32 {
	var priorities []int32
	for _, object := range pods {
		if pod := Pod(object); pod.Leaving && pod.Request > 0 && object.Spec.NodeName != "" && !Overdue(object, now) {
			priorities = append(priorities, pod.Priority)
		}
	}
	return priorities
}

// IsMirror reports whether the pod mirrors a static pod. Its deletion ends no container, and the kubelet creates it again.
func IsMirror(pod *corev1.Pod) bool {
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return mirror
}

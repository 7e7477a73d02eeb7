package protocol

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// overdueMargin is how long after the end of its grace period a pod may take to be gone: the kubelet kills what is left,
// unmounts volumes and reports, which takes seconds.
const overdueMargin = time.Minute

// Overdue reports whether the pod is being deleted and should have been gone for a while: its containers don't end (a
// driver that hangs), its node is dead, or nothing removes a finalizer. It may stay for ever, so no plan may count on the
// memory that it holds. The deletion timestamp is the end of the grace period, not its start
// (k8s.io/apimachinery pkg/apis/meta/v1, ObjectMeta).
func Overdue(pod *corev1.Pod, now time.Time) bool {
	return pod.DeletionTimestamp != nil && now.Sub(pod.DeletionTimestamp.Time) > overdueMargin
}

// Leaving returns the priorities of those pods among the given ones that hold GPU memory, are being deleted and aren't
// overdue: memory of them should come free soon.
func Leaving(pods []*corev1.Pod, now time.Time) []int32 {
	var priorities []int32
	for _, object := range pods {
		if pod := Pod(object); pod.Leaving && pod.Request > 0 && object.Spec.NodeName != "" && !Overdue(object, now) {
			priorities = append(priorities, pod.Priority)
		}
	}
	return priorities
}

// Mirror reports whether the pod only shows a static pod of its node: the kubelet creates it again when it is deleted, and
// no container ends.
func Mirror(pod *corev1.Pod) bool {
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return mirror
}

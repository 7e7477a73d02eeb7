package protocol

import (
	"time"

	corev1 "k8s.io/api/core/v1"
)

// OverdueMargin is how long a pod may exist after the end of its grace period. The kubelet then kills the containers,
// unmounts the volumes and updates the status, which takes seconds.
const OverdueMargin = time.Minute

// Overdue reports whether a pod that is being deleted still exists well after its deletion timestamp, which is the end of the grace
// period (k8s.io/apimachinery pkg/apis/meta/v1, ObjectMeta): its containers don't end (the driver hangs), its node is down, or a
// finalizer stays. This can last, so its memory is not expected to become free.
func Overdue(deletion, now time.Time) bool { return now.Sub(deletion) > OverdueMargin }

// IsMirror reports whether the pod mirrors a static pod. Its deletion ends no container, and the kubelet creates it again.
func IsMirror(pod *corev1.Pod) bool {
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return mirror
}

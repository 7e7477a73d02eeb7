package protocol

import (
	"math"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// OverdueMargin is how long a pod may exist after the end of its grace period. The kubelet then kills the containers,
// unmounts the volumes and updates the status, which takes seconds.
const OverdueMargin = time.Minute

// MaxGracePeriod is how long a pod that is being deleted is waited for, and the longest grace period of an eviction by the extender: otherwise a
// pod could keep memory for a month. It is what cluster-autoscaler allows by default (--max-graceful-termination-sec).
const MaxGracePeriod = 10 * time.Minute

// LeavesBy returns the time up to which a pod that is being deleted is waited for: its deletion timestamp, but at most MaxGracePeriod after the
// deletion was requested. graceSeconds is its metadata.deletionGracePeriodSeconds.
func LeavesBy(deletion time.Time, graceSeconds int64) time.Time {
	return deletion.Add(-time.Duration(max(min(graceSeconds, math.MaxInt32)-int64(MaxGracePeriod/time.Second), 0)) * time.Second)
}

// Lingers reports whether a pod is being deleted with a grace period of more than MaxGracePeriod. An eviction shortens it to that
// (k8s.io/apiserver pkg/registry/rest/delete.go, BeforeDelete).
func Lingers(pod *corev1.Pod) bool {
	grace := pod.DeletionGracePeriodSeconds
	return pod.DeletionTimestamp != nil && grace != nil && *grace > int64(MaxGracePeriod/time.Second)
}

// Overdue reports whether a pod that is being deleted still exists well after its deletion timestamp, which is the end of the grace
// period (k8s.io/apimachinery pkg/apis/meta/v1, ObjectMeta): its containers don't end (the driver hangs), its node is down, or a
// finalizer stays. This can last, so its memory is not expected to become free.
func Overdue(deletion, now time.Time) bool { return now.Sub(deletion) > OverdueMargin }

// IsMirror reports whether the pod mirrors a static pod. Its deletion ends no container, and the kubelet creates it again.
func IsMirror(pod *corev1.Pod) bool {
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return mirror
}

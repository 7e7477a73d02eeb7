package clustercache

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// memberOf returns the pod as a member of its gang, or nil if it names no group.
func memberOf(pod *corev1.Pod) *gang.Member {
	if !protocol.InGroup(pod) {
		return nil
	}
	group, err := protocol.GroupOf(pod)
	m := &gang.Member{
		Pod: protocol.Pod(pod), Gang: gang.Key{Namespace: pod.Namespace, Name: group.Name}, Size: group.Size,
		Created: pod.CreationTimestamp.Time, Template: protocol.TemplateHash(pod), Node: pod.Spec.NodeName,
		MarkedWhole: pod.Annotations[protocol.AnnotationGroupWhole] == "true",
		Ended:       protocol.Terminal(pod), Succeeded: pod.Status.Phase == corev1.PodSucceeded,
		Gated: len(pod.Spec.SchedulingGates) > 0, Cardless: !protocol.RequestsCards(pod),
	}
	if err != nil {
		m.Problem, m.Size = err.Error(), 0
	}
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		m.Controller = string(owner.UID)
	}
	for _, condition := range pod.Status.Conditions {
		// The API server sets the condition together with the node (k8s.io/kubernetes
		// pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata).
		if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionTrue && m.Node != "" {
			m.BoundAt = condition.LastTransitionTime.Time
		}
	}
	return m
}

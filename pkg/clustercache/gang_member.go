package clustercache

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// memberOf returns the pod as a member of its gang, or nil if it names no group. A native group has no size here: its PodGroup
// says it. problem is why the pod gets no node; nil if it can get one.
func memberOf(pod *corev1.Pod, p gpu.Pod, problem error) *gang.Member {
	podGroup := protocol.PodGroupName(pod)
	key, group, err := gang.Key{Namespace: pod.Namespace, Name: podGroup, Native: true}, protocol.Group{}, error(nil)
	switch {
	case protocol.InGroup(pod):
		group, err = protocol.GroupOf(pod)
		key = gang.Key{Namespace: pod.Namespace, Name: group.Name}
	case podGroup == "":
		return nil
	}
	m := &gang.Member{
		Pod: p, Gang: key, PodGroup: podGroup, Size: group.Size, JobSet: protocol.JobSetOf(pod),
		Created: pod.CreationTimestamp.Time, Template: protocol.TemplateHash(pod), Shape: protocol.ShapeHash(pod),
		Node: pod.Spec.NodeName, Run: protocol.Shorten(pod.Annotations[protocol.AnnotationGroupRun]),
		MarkedWhole: pod.Spec.NodeName != "" && pod.Annotations[protocol.AnnotationGroupWhole] == "true",
		Ended:       protocol.Terminal(pod), Succeeded: pod.Status.Phase == corev1.PodSucceeded,
		Scheduler: pod.Spec.SchedulerName, GatedOtherwise: slices.ContainsFunc(pod.Spec.SchedulingGates, foreign),
		Gated:    slices.ContainsFunc(pod.Spec.SchedulingGates, ofFairShare),
		Cardless: !protocol.RequestsCards(pod),
	}
	if err != nil {
		m.Problem, m.Size = err.Error(), 0
	} else if problem != nil && m.Node == "" {
		m.Problem = problem.Error() // It would hold up a plan of the others.
	}
	if owner := metav1.GetControllerOfNoCopy(pod); owner != nil {
		m.Controller, m.Kind = ownerOf(owner, pod.Labels).ID(), owner.Kind
	}
	if group.LeaderWorkerSet {
		m.Kind = gang.LeaderWorkerSet
	}
	for i := range pod.Status.Conditions {
		switch condition := &pod.Status.Conditions[i]; {
		case condition.Type != corev1.PodScheduled:
		case m.Node == "":
			m.ShortOfResources = shortOfResources(condition)
		case condition.Status == corev1.ConditionTrue:
			// The API server sets the condition together with the node (k8s.io/kubernetes
			// pkg/registry/core/pod/storage/storage.go, setPodNodeAndMetadata).
			m.BoundAt = condition.LastTransitionTime.Time
		}
	}
	return m
}

// PodGroupOf returns what the PodGroup says about its pods, and the key of their gang.
func PodGroupOf(group *schedulingv1beta1.PodGroup) (gang.Key, gang.PodGroup) {
	size, alone, err := protocol.ParsePodGroup(group)
	podGroup := gang.PodGroup{Size: size, Alone: alone, Priority: ptr.Deref(group.Spec.Priority, 0), Together: protocol.DisruptedTogether(group)}
	if err != nil {
		podGroup.Problem = fmt.Sprintf("PodGroup %s: %v", group.Name, err)
	}
	return gang.Key{Namespace: group.Namespace, Name: group.Name, Native: true}, podGroup
}

func ofFairShare(gate corev1.PodSchedulingGate) bool { return gate.Name == protocol.GateFairShare }

// foreign reports whether the gate is not that of fair shares, which the extender itself removes.
func foreign(gate corev1.PodSchedulingGate) bool { return gate.Name != protocol.GateFairShare }

// shortOfResources reports whether kube-scheduler found that nodes lack GPU memory, CPU or other resources for the pod. It doesn't offer such nodes
// to the extender.
func shortOfResources(condition *corev1.PodCondition) bool {
	return condition.Status == corev1.ConditionFalse && condition.Reason == corev1.PodReasonUnschedulable &&
		reasons.LacksResources(condition.Message)
}

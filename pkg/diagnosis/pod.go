package diagnosis

import (
	"cmp"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Pod is what the diagnosis needs of a pod without a node. It is never changed after it was built.
type Pod struct {
	gpu.Pod
	// NominatedNode is status.nominatedNodeName.
	NominatedNode string
	// Gates are the names of the pod's scheduling gates.
	Gates []string
	// Scheduler is the name of the scheduler that the pod is assigned to.
	Scheduler string
	// Message is kube-scheduler's last message about the pod, or that it has not tried the pod yet.
	Message string
	// Tried is true if kube-scheduler has tried the pod: the message is its own.
	Tried bool
	// Failed is true if kube-scheduler reports an error of its own, of the extender or of the bind, instead of nodes that
	// don't fit (the condition's reason is SchedulerError; k8s.io/kubernetes pkg/scheduler/schedule_one.go,
	// handleSchedulingFailure).
	Failed bool
	// Created is the pod's creation time.
	Created time.Time
	// Rejected is true if kube-scheduler has marked the pod as unschedulable.
	Rejected bool

	affinity    nodeaffinity.RequiredNodeAffinity
	tolerations []corev1.Toleration
	// cacheKey is equal for pods with the same request and the same constraints on nodes; empty if it can't be computed.
	cacheKey string
}

// NewPod returns the fields of a pod. The result shares nothing with the argument.
func NewPod(pod *corev1.Pod) *Pod {
	constraints := nodeConstraints(pod)
	scheduler := cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName)
	p := &Pod{
		Pod: protocol.Pod(pod), NominatedNode: pod.Status.NominatedNodeName,
		Scheduler: scheduler, Message: fmt.Sprintf("scheduler %q has not tried it yet", scheduler),
		Created: pod.CreationTimestamp.Time, affinity: nodeaffinity.GetRequiredNodeAffinity(constraints), tolerations: constraints.Spec.Tolerations,
	}
	for _, gate := range pod.Spec.SchedulingGates {
		p.Gates = append(p.Gates, gate.Name)
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status != corev1.ConditionTrue {
			p.Message = cmp.Or(condition.Message, condition.Reason, p.Message)
			p.Rejected = condition.Status == corev1.ConditionFalse
			p.Tried = condition.Reason != corev1.PodReasonSchedulingGated
			p.Failed = condition.Reason == corev1.PodReasonSchedulerError
		}
	}
	if text, err := constraints.Spec.Marshal(); err == nil {
		p.cacheKey = p.Request.String() + " " + string(text)
	}
	return p
}

// nodeConstraints returns a pod with only the required constraints on nodes.
func nodeConstraints(pod *corev1.Pod) *corev1.Pod {
	spec := corev1.PodSpec{NodeSelector: pod.Spec.NodeSelector, Tolerations: pod.Spec.Tolerations}
	if pod.Spec.Affinity != nil && pod.Spec.Affinity.NodeAffinity != nil {
		spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution,
		}}
	}
	return &corev1.Pod{Spec: *spec.DeepCopy()}
}

package diagnosis

import (
	"cmp"
	"fmt"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
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
	// RequestError is why the pod gets no node: it is too large, or no node can give it what it asks for (protocol.CheckRequest). It is
	// empty if one can.
	RequestError string
	// Created is the pod's creation time.
	Created time.Time
	// Rejected is true if kube-scheduler has marked the pod as unschedulable.
	Rejected bool

	// ungated is true if the pod was created with scheduling gates, has none any more, and has not been tried since.
	ungated bool
	// asks are the containers' requests, in words if several add up to the pod's. largest is the largest of them.
	asks    string
	largest containerRequest
	// Constraints is eligibility.ConstraintsOf the pod.
	Constraints unique.Handle[string]
}

// NewPod returns the fields of a pod. The result shares nothing with the argument.
func NewPod(object *corev1.Pod) *Pod {
	pod, tooLarge := protocol.Outline(object)
	return NewPodOf(pod, protocol.Pod(pod), cmp.Or(tooLarge, protocol.CheckRequest(pod)))
}

// NewPodOf is NewPod for the outline of a pod and its values. problem is why the pod gets no node; nil if it can get one.
func NewPodOf(pod *corev1.Pod, values gpu.Pod, problem error) *Pod {
	scheduler := cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName)
	p := &Pod{
		Pod: values, NominatedNode: pod.Status.NominatedNodeName,
		Scheduler: scheduler, Message: fmt.Sprintf("scheduler %q has not tried it yet", scheduler),
		Created: pod.CreationTimestamp.Time, Constraints: eligibility.ConstraintsOf(pod),
	}
	if problem != nil {
		p.RequestError = problem.Error()
	}
	p.asks, p.largest = amounts(pod)
	for _, gate := range pod.Spec.SchedulingGates {
		p.Gates = append(p.Gates, gate.Name)
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status != corev1.ConditionTrue {
			p.Message = cmp.Or(reasons.Bounded(condition.Message), condition.Reason, p.Message)
			p.Rejected = condition.Status == corev1.ConditionFalse
			p.Tried = condition.Reason != corev1.PodReasonSchedulingGated
			p.ungated = !p.Tried && len(p.Gates) == 0
			p.Failed = condition.Reason == corev1.PodReasonSchedulerError
		}
	}
	return p
}

package diagnosis

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	schedulinghelper "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

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
	// RequestError is why no node can give the pod what it asks for, see protocol.CheckRequest; empty if one can.
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
	// constraints are the required constraints on nodes, and affinity the same for matching.
	constraints corev1.PodSpec
	affinity    nodeaffinity.RequiredNodeAffinity
	// constraintsKey is equal for pods with the same constraints, and roomKey for those for which the same nodes have room.
	constraintsKey, roomKey string
}

// NewPod returns the fields of a pod. The result shares nothing with the argument.
func NewPod(pod *corev1.Pod) *Pod {
	constraints := nodeConstraints(pod)
	scheduler := cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName)
	p := &Pod{
		Pod: protocol.Pod(pod), NominatedNode: pod.Status.NominatedNodeName,
		Scheduler: scheduler, Message: fmt.Sprintf("scheduler %q has not tried it yet", scheduler),
		Created: pod.CreationTimestamp.Time, constraints: constraints.Spec, affinity: nodeaffinity.GetRequiredNodeAffinity(constraints),
	}
	if err := protocol.CheckRequest(pod); err != nil {
		p.RequestError = err.Error()
	}
	p.asks, p.largest = amounts(pod)
	for _, gate := range pod.Spec.SchedulingGates {
		p.Gates = append(p.Gates, gate.Name)
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodScheduled && condition.Status != corev1.ConditionTrue {
			p.Message = cmp.Or(condition.Message, condition.Reason, p.Message)
			p.Rejected = condition.Status == corev1.ConditionFalse
			p.Tried = condition.Reason != corev1.PodReasonSchedulingGated
			p.ungated = !p.Tried && len(p.Gates) == 0
			p.Failed = condition.Reason == corev1.PodReasonSchedulerError
		}
	}
	if text, err := constraints.Spec.Marshal(); err == nil {
		p.constraintsKey = constraintsKey(p.Pod, text)
		p.roomKey = fmt.Sprintf("%v %d %s", p.Demand(), p.Priority, text)
	} else { // Unreachable; the pod would share nothing with others.
		p.constraintsKey, p.roomKey = string(p.UID), string(p.UID)
	}
	if p.NominatedNode != "" { // No room is kept from the pod for itself.
		p.roomKey += " " + string(p.UID)
	}
	return p
}

// Constraints is equal for pods that can use the same nodes, independent of free resources.
func (p *Pod) Constraints() string { return p.constraintsKey }

// Constraints returns the same as NewPod(pod).Constraints(), with less work. The pod may be bound: then the cards that it has count
// instead of its label, which users can change.
func Constraints(pod *corev1.Pod) string {
	text, err := nodeConstraints(pod).Spec.Marshal()
	if err != nil { // Unreachable.
		return string(pod.UID)
	}
	p := protocol.Pod(pod)
	if pod.Spec.NodeName != "" {
		where, _ := protocol.PodPlacement(pod) // None counts as one card.
		p.Cards = len(where)
	}
	return constraintsKey(p, text)
}

func constraintsKey(pod gpu.Pod, spec []byte) string {
	demand := pod.Demand()
	return fmt.Sprintf("%t %t %s", demand.Cards > 1, demand.Cores > 0, spec)
}

// podWith parses what Constraints returned. It returns a pod with these constraints; nil if they can't be parsed.
func podWith(constraints string) *Pod {
	severalCards, rest, _ := strings.Cut(constraints, " ")
	cores, spec, found := strings.Cut(rest, " ")
	p := &Pod{}
	if err := p.constraints.Unmarshal([]byte(spec)); err != nil || !found {
		return nil
	}
	p.affinity = nodeaffinity.GetRequiredNodeAffinity(&corev1.Pod{Spec: p.constraints})
	p.Request, p.Cards = 1, 1
	if severalCards == "true" {
		p.Cards = 2
	}
	if cores == "true" {
		p.Cores = 1
	}
	return p
}

// toleratesClosed reports whether the pod can use nodes that are closed for this reason: cordoned ones, as pods of a DaemonSet can
// (k8s.io/kubernetes pkg/scheduler/framework/plugins/nodeunschedulable), or such that aren't ready, which kube-scheduler knows by
// their taints alone. If the node has further taints, these are checked too.
func (p *Pod) toleratesClosed(reason string) bool {
	var taints []string
	switch reason {
	case cordoned:
		taints = []string{corev1.TaintNodeUnschedulable}
	case notReady:
		taints = []string{corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable}
	}
	return slices.ContainsFunc(taints, func(key string) bool {
		taint := &corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule}
		return schedulinghelper.TolerationsTolerateTaint(klog.Background(), p.constraints.Tolerations, taint, true)
	})
}

// excludes returns by which of its constraints the pod excludes a node.
func (p *Pod) excludes() string {
	selector, affinity := p.constraints.NodeSelector, p.constraints.Affinity != nil
	switch text := labels.FormatLabels(selector); {
	case len(selector) > 0 && affinity:
		return fmt.Sprintf("excluded by the pod's node selector (%s) or its node affinity", text)
	case affinity:
		return "excluded by the pod's node affinity"
	default:
		return fmt.Sprintf("excluded by the pod's node selector (%s)", text)
	}
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

package scheduling

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Preempt corrects the victims of kube-scheduler's proposal for a pod, node by node, so that their eviction frees a
// card. It omits the nodes on which no card can be freed. It has no side effects: kube-scheduler chooses the node and
// evicts the victims.
func (s *Scheduler) Preempt(ctx context.Context, object *corev1.Pod, proposed map[string]preemption.Victims) (map[string]preemption.Victims, error) {
	switch {
	case neverPreempts(object):
		return nil, nil
	case s.groups.incomplete(object):
		return nil, nil // Pods would be evicted for one member of a gang that may never become whole.
	case protocol.PodRequest(object) == 0:
		return proposed, nil
	}
	if err := s.cache.Ready(); err != nil {
		return nil, err
	}
	if s.groups.displace(protocol.Pod(object), slices.Sorted(maps.Keys(proposed))) {
		// No pod has to be evicted. kube-scheduler retries the pod when the members with rejected binds leave its cache.
		return nil, nil
	}
	if !s.cache.BudgetsSynced() {
		return nil, fmt.Errorf("%w: disruption budgets are still being listed", clustercache.ErrNotSynced)
	}
	pod := clustercache.NewPodInfo(object)
	survey := eviction.NewSurvey(s.ledger, s.cache, pod, s.Clock.Now())
	answer := map[string]preemption.Victims{}
	for node, proposal := range proposed {
		if victims, ok := survey.Victims(node, proposal); ok {
			answer[node] = victims
		}
	}
	klog.FromContext(ctx).Info("Victims chosen by card", "pod", klog.KObj(object), "priority", pod.Priority,
		"memory", pod.Request.String(), "nodesProposed", len(proposed), "nodes", len(answer))
	return answer, nil
}

// neverPreempts reports whether the pod's preemption policy is Never.
func neverPreempts(pod *corev1.Pod) bool {
	policy := pod.Spec.PreemptionPolicy
	return policy != nil && *policy == corev1.PreemptNever
}

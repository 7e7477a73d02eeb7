package scheduling

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/preemption"
)

// maxPreempt limits the time for the choice of victims: kube-scheduler schedules no pod meanwhile.
const maxPreempt = time.Second

// Preempt corrects the victims of kube-scheduler's proposal for a pod, node by node, so that their eviction frees the
// cards that the pod needs. It omits the nodes on which too few can be freed, and, in a call with very much work, those for which no time is
// left: kube-scheduler then chooses among the others. kube-scheduler chooses the node and evicts the victims. It evicts none if the answer is
// empty.
func (s *Scheduler) Preempt(ctx context.Context, object *corev1.Pod, proposed map[string]preemption.Victims) (map[string]preemption.Victims, error) {
	pod := s.podInfo(object)
	switch {
	case pod.RequestError != "", pod.NeverPreempts: // No eviction helps, or none is wanted.
		return nil, nil
	case s.fair.awaitsTurn(pod.Pod):
		return nil, nil
	case s.groups.incomplete(pod):
		return nil, nil // Pods would be evicted for one member of a gang that may never become whole.
	case pod.Request == 0:
		return proposed, nil
	case s.ledger.NeedsTurn(pod.Pod):
		return nil, nil // It was granted because everything it needs was free.
	}
	if err := cmp.Or(ctx.Err(), s.cache.Ready()); err != nil {
		return nil, err
	}
	if s.nominator.Requested(pod.UID) {
		return nil, nil // Another node has room.
	}
	if s.preemptors.VictimsSuffice(pod.UID) {
		klog.FromContext(ctx).Info("No victims proposed, because pods are leaving a node for the pod already", "pod", klog.KObj(object))
		return nil, nil // The pod is requeued when they are gone.
	}
	displaced := s.displace(pod, slices.Sorted(maps.Keys(proposed)))
	s.preemptors.OnlyTakenPlace(pod, proposed)
	if displaced {
		return nil, nil // kube-scheduler retries the pod when the binds of the groups' members are rejected: it may need no victims then.
	}
	if !s.cache.BudgetsSynced() {
		return nil, fmt.Errorf("%w: disruption budgets are still being listed", clustercache.ErrNotSynced)
	}
	maps.DeleteFunc(proposed, func(_ string, proposal preemption.Victims) bool {
		return slices.ContainsFunc(proposal.Pods, s.groups.isPending) // It retries the pod when their binds are rejected, or their group is complete.
	})
	if s.EvictFragmented { // kube-scheduler 1.38 and later. The Preemptors free a card on these nodes, and violate no budget.
		maps.DeleteFunc(proposed, func(_ string, proposal preemption.Victims) bool { return len(proposal.Pods) == 0 })
	}
	limited, cancel := s.withTimeout(ctx, maxPreempt)
	defer cancel()
	answer, undecided := eviction.NewSurvey(s.ledger, s.cache, s.groups.manager.PodGroupOf, pod, s.Clock.Now()).Victims(limited, proposed)
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if s.preemptors.KeepIfRepeated(pod.Pod, answer) {
		klog.FromContext(ctx).Info("No victims proposed, because those of the last call are leaving or gone already", "pod", klog.KObj(object))
		return nil, nil // kube-scheduler retries the pod when it sees their end.
	}
	if len(answer) > 0 {
		s.preemptors.Proposed(pod.UID, answer)
	}
	klog.FromContext(ctx).Info("Victims chosen by card", "pod", klog.KObj(object), "priority", pod.Priority,
		"memory", pod.Request.String(), "nodesProposed", len(proposed), "nodesUndecided", undecided, "nodes", len(answer))
	return answer, nil
}

package eviction

import (
	"context"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// PodGroups returns the PodGroup of a pod; known is false if the pod has none.
type PodGroups func(uid gpu.PodUID) (podGroup gang.PodGroup, known bool)

// Survey collects the input of the decision which pods of a node to evict for one preemptor. It is used for one request
// only.
type Survey struct {
	ledger    *ledger.Ledger
	cache     Cache
	podGroups PodGroups
	pod       *clustercache.PodInfo
	// resources are the resources that the preemptor requests, and pods as the last one. All Amounts have this order.
	resources []corev1.ResourceName
	request   preemption.Request
	budgets   budgets
	now       time.Time
}

// NewSurvey returns a Survey for the preemptor.
func NewSurvey(l *ledger.Ledger, cache Cache, podGroups PodGroups, preemptor *clustercache.PodInfo, now time.Time) *Survey {
	s := &Survey{ledger: l, cache: cache, podGroups: podGroups, pod: preemptor, budgets: newBudgets(cache), now: now}
	for name := range preemptor.Requests {
		s.resources = append(s.resources, name)
	}
	s.resources = append(s.resources, protocol.ResourceMemory, corev1.ResourcePods)
	s.request = preemption.Request{Demand: preemptor.Demand(), Resources: s.amounts(preemptor.Use)}
	return s
}

// amounts returns the amount of each of the resources.
func (s *Survey) amounts(of func(name corev1.ResourceName) int64) preemption.Amounts {
	out := make(preemption.Amounts, len(s.resources))
	for i, name := range s.resources {
		out[i] = of(name)
	}
	return out
}

// Victims returns the victims on each node, given kube-scheduler's proposals. It omits the nodes that are no candidates, those that keep CPU or
// another resource for pods that come before the preemptor and then have too little of it, and those that are
// left when the context has ended; undecided is the number of the latter.
func (s *Survey) Victims(ctx context.Context, proposed map[string]preemption.Victims) (victims map[string]preemption.Victims, undecided int) {
	victims = map[string]preemption.Victims{}
	names := slices.Sorted(maps.Keys(proposed))
	for i, name := range names {
		if ctx.Err() != nil {
			return victims, len(names) - i
		}
		node, ok := s.node(name, proposed[name])
		if !ok {
			continue
		}
		if chosen, ok := preemption.Choose(node, s.request); ok && s.ledger.FitsResources(name, []gpu.Pod{s.pod.Pod}, chosen.Pods, nil) {
			victims[name] = chosen
		}
	}
	return victims, 0
}

// node collects the input of the decision about one node. It returns false if no eviction can help there, and if the proposal has a pod of another
// node: kube-scheduler proposes all pods of a PodGroup that may only be disrupted together, and accepts no answer with pods of other nodes
// (k8s.io/kubernetes pkg/scheduler/extender.go, convertPodUIDToPod).
func (s *Survey) node(name string, proposal preemption.Victims) (preemption.Node, bool) {
	available, reason := s.ledger.Availability(name, s.pod.Pod, nil)
	if reason.Unresolvable() {
		return preemption.Node{}, false
	}
	object, ok := s.cache.Node(name)
	if !ok {
		return preemption.Node{}, false // The node was deleted in the meantime.
	}
	allocatable := eligibility.AmountsOf(object.Status.Allocatable)
	node := preemption.Node{
		Cards: available.Cards, Violations: proposal.Violations, Free: s.amounts(func(name corev1.ResourceName) int64 { return allocatable[name] }),
	}
	pods := s.podsOf(name, node.Free)
	allocations := map[gpu.PodUID]*ledger.Allocation{}
	for i := range available.Allocations {
		allocations[available.Allocations[i].UID] = &available.Allocations[i]
	}
	seen := make(map[gpu.PodUID]bool, len(proposal.Pods))
	for _, uid := range proposal.Pods {
		if seen[uid] {
			continue // The proposal names the pod twice.
		}
		seen[uid] = true
		if on, _, held := s.ledger.Lookup(uid); held && on != name {
			return preemption.Node{}, false
		}
		p, together := s.candidate(uid, pods[uid], allocations[uid])
		p.Proposed = true
		p.MustEvict = together || pods[uid] == nil || clustercache.Interferes(pods[uid], s.pod)
		node.Pods = append(node.Pods, p)
		delete(allocations, uid)
	}
	for uid, allocation := range allocations {
		if p, together := s.candidate(uid, pods[uid], allocation); p.Priority < s.pod.Priority && !together {
			node.Pods = append(node.Pods, p)
		}
	}
	node.Budgets = s.budgets.allowed
	return node, true
}

// candidate describes a potential victim. Its object, its allocation, or both may be unknown (nil). together is true if it may only be evicted together
// with the other pods of its PodGroup, whose priority counts instead of its own.
func (s *Survey) candidate(uid gpu.PodUID, pod *clustercache.PodInfo, allocation *ledger.Allocation) (out preemption.Pod, together bool) {
	out = preemption.Pod{UID: uid, BudgetsUnknown: allocation == nil || pod != nil && pod.TooLarge}
	if pod != nil {
		out.Priority, out.Terminating, out.Requests = pod.Priority, pod.Leaving, s.amounts(pod.Use)
	}
	if allocation != nil {
		if pod != nil {
			out.Budgets = s.budgets.of(pod)
		}
		out.Priority, out.Terminating = allocation.Priority, allocation.Leaving
		if certain(allocation) {
			out.Placement = allocation.Placement
		}
	}
	if pod != nil && !frees(pod, s.now) {
		out.Placement, out.Requests = nil, nil
	}
	if pod != nil && pod.Member != nil && pod.Member.PodGroup != "" {
		if podGroup, known := s.podGroups(uid); known {
			out.Priority, together = podGroup.Priority, podGroup.Together
		}
	}
	return out, together
}

// podsOf returns the live pods of a node. It subtracts from free what they use, and what nominated pods of equal or
// higher priority are about to use.
func (s *Survey) podsOf(name string, free preemption.Amounts) map[gpu.PodUID]*clustercache.PodInfo {
	pods := map[gpu.PodUID]*clustercache.PodInfo{}
	for _, pod := range s.cache.PodsOn(name) {
		if pod.Node != "" {
			pods[pod.UID] = pod
		}
		if !pod.CountsFor(&s.pod.PodUse) {
			continue
		}
		for i, name := range s.resources {
			free[i] -= pod.Use(name)
		}
	}
	return pods
}

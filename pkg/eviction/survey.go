package eviction

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Survey collects the input of the decision which pods of a node to evict for one preemptor. It is used for one request
// only.
type Survey struct {
	ledger Ledger
	cache  Cache
	pod    *clustercache.PodInfo
	// resources are the resources that the preemptor requests, and pods as the last one. All Amounts have this order.
	resources clustercache.Resources
	request   preemption.Request
	budgets   budgets
	now       time.Time
}

// NewSurvey returns a Survey for the preemptor.
func NewSurvey(l Ledger, cache Cache, preemptor *clustercache.PodInfo, now time.Time) *Survey {
	s := &Survey{ledger: l, cache: cache, pod: preemptor, budgets: budgets{cache: cache, namespaces: map[string][]budget{}}, now: now}
	for name := range preemptor.Requests {
		s.resources = append(s.resources, name)
	}
	s.resources = append(s.resources, protocol.ResourceMemory, corev1.ResourcePods)
	s.request = preemption.Request{Demand: preemptor.Demand(), Resources: s.resources.Uses(preemptor)}
	return s
}

// Victims returns the victims on one node, given kube-scheduler's proposal. It returns false if the node is not a
// candidate.
func (s *Survey) Victims(name string, proposal preemption.Victims) (preemption.Victims, bool) {
	node, ok := s.node(name, proposal)
	if !ok {
		return preemption.Victims{}, false
	}
	return preemption.Choose(node, s.request)
}

// node collects the input of the decision about one node. It returns false if no eviction can help there.
func (s *Survey) node(name string, proposal preemption.Victims) (preemption.Node, bool) {
	available, reason := s.ledger.Availability(name, s.pod.Pod)
	if reason.Unresolvable() {
		return preemption.Node{}, false
	}
	object, ok := s.cache.Node(name)
	if !ok {
		return preemption.Node{}, false // The node was deleted in the meantime.
	}
	node := preemption.Node{
		Cards: available.Cards, Free: s.resources.Amounts(object.Status.Allocatable), Violations: proposal.Violations,
	}
	pods := s.podsOf(name, node.Free)
	allocations := map[gpu.PodUID]*ledger.Allocation{}
	for i := range available.Allocations {
		allocations[available.Allocations[i].UID] = &available.Allocations[i]
	}
	for _, uid := range proposal.Pods {
		if slices.ContainsFunc(node.Pods, func(p preemption.Pod) bool { return p.UID == uid }) {
			continue // The proposal names the pod twice.
		}
		p := s.candidate(uid, pods[uid], allocations[uid])
		p.Proposed = true
		p.MustEvict = pods[uid] == nil || clustercache.Interferes(pods[uid], s.pod)
		node.Pods = append(node.Pods, p)
		delete(allocations, uid)
	}
	for uid, allocation := range allocations {
		if allocation.Priority >= s.pod.Priority || !certain(allocation) || pods[uid] != nil && !s.frees(pods[uid]) {
			continue
		}
		node.Pods = append(node.Pods, s.candidate(uid, pods[uid], allocation))
	}
	node.Budgets = s.budgets.allowed
	return node, true
}

// candidate describes a potential victim. Its object, its allocation, or both may be unknown (nil).
func (s *Survey) candidate(uid gpu.PodUID, pod *clustercache.PodInfo, allocation *ledger.Allocation) preemption.Pod {
	out := preemption.Pod{UID: uid, BudgetsUnknown: allocation == nil}
	if pod != nil {
		out.Priority, out.Terminating, out.Requests = pod.Priority, pod.Leaving, s.resources.Uses(pod)
		if allocation != nil {
			out.Budgets = s.budgets.of(pod)
		}
	}
	if allocation != nil {
		out.Priority, out.Terminating = allocation.Priority, allocation.Leaving
		if certain(allocation) {
			out.Placement = allocation.Placement
		}
	}
	if pod != nil && !s.frees(pod) {
		out.Placement, out.Requests = nil, nil
	}
	return out
}

// frees reports whether the deletion of the pod makes room on the node.
func (s *Survey) frees(pod *clustercache.PodInfo) bool { return frees(pod, s.now) }

// podsOf returns the live pods of a node. It subtracts from free what they use, and what nominated pods of equal or
// higher priority are about to use.
func (s *Survey) podsOf(name string, free preemption.Amounts) map[gpu.PodUID]*clustercache.PodInfo {
	pods := map[gpu.PodUID]*clustercache.PodInfo{}
	for _, pod := range s.cache.PodsOn(name) {
		if pod.Node != "" {
			pods[pod.UID] = pod
		}
		if !pod.CountsFor(s.pod) {
			continue
		}
		for i := range s.resources {
			free[i] -= s.resources.Use(i, pod)
		}
	}
	return pods
}

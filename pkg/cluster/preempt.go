package cluster

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// Preempt corrects the victims that kube-scheduler proposes for a pod, node by node, so that their going frees a card.
// Nodes where none can be freed are left out. It decides only: kube-scheduler chooses the node and evicts.
func (c *Cluster) Preempt(ctx context.Context, pod *corev1.Pod, proposed map[string]preemption.Victims) (map[string]preemption.Victims, error) {
	if neverPreempts(pod) {
		return nil, nil
	}
	if c.gangs.waits(pod) {
		return nil, nil // Others would leave for one member of a group that may never be whole.
	}
	if protocol.PodRequest(pod) == 0 {
		return proposed, nil
	}
	if err := c.Ready(); err != nil {
		return nil, err
	}
	if !c.sync.budgets() {
		return nil, fmt.Errorf("%w: disruption budgets are still being listed", ErrNotReady)
	}
	s := c.newSurvey(pod, podRequests(pod, protocol.PodRequest(pod)))
	answer := map[string]preemption.Victims{}
	for name, proposal := range proposed {
		if victims, ok := s.choose(name, proposal); ok {
			answer[name] = victims
		}
	}
	klog.FromContext(ctx).Info("Victims chosen by card", "pod", klog.KObj(pod), "priority", s.pod.Priority,
		"memory", s.pod.Request.String(), "nodesProposed", len(proposed), "nodes", len(answer))
	return answer, nil
}

// survey gathers what the decision needs to know of nodes, for one preemptor.
type survey struct {
	*Cluster
	pod  gpu.Pod
	spec *corev1.PodSpec
	// resources are those that the preemptor asks for, a place among the node's pods last: the order of all Amounts.
	resources []corev1.ResourceName
	request   preemption.Request
	book      budgetBook
	now       time.Time
}

// newSurvey begins a survey for a pod that takes these of its node.
func (c *Cluster) newSurvey(pod *corev1.Pod, requests corev1.ResourceList) *survey {
	s := &survey{Cluster: c, pod: protocol.Pod(pod), spec: &pod.Spec, book: budgetBook{lister: c.budgets}, now: c.Clock.Now()}
	for name := range requests {
		s.resources = append(s.resources, name)
	}
	s.resources = append(s.resources, corev1.ResourcePods)
	s.request = preemption.Request{Memory: s.pod.Request, Resources: s.takes(requests)}
	return s
}

// choose decides for one node.
func (s *survey) choose(name string, proposal preemption.Victims) (preemption.Victims, bool) {
	node, ok := s.node(name, proposal)
	if !ok {
		return preemption.Victims{}, false
	}
	return preemption.Choose(node, s.request)
}

// node gathers what the decision needs of one node. false says that nobody's going could help there.
func (s *survey) node(name string, proposal preemption.Victims) (preemption.Node, bool) {
	standing, reason := s.ledger.Availability(name, s.pod)
	if reason.Unresolvable() {
		return preemption.Node{}, false
	}
	object, err := s.nodes.Get(name)
	if err != nil {
		return preemption.Node{}, false // It has gone meanwhile.
	}
	node := preemption.Node{
		Cards: standing.Cards, Free: s.amounts(object.Status.Allocatable), Violations: proposal.Violations,
	}
	pods := s.podsOf(name, node.Free)
	holders := map[gpu.PodUID]*ledger.Allocation{}
	for i := range standing.Allocations {
		holders[standing.Allocations[i].UID] = &standing.Allocations[i]
	}
	guard := &guard{book: &s.book}
	for _, uid := range proposal.Pods {
		if slices.ContainsFunc(node.Pods, func(p preemption.Pod) bool { return p.UID == uid }) {
			continue // Named twice.
		}
		p := s.candidate(uid, pods[uid], holders[uid], guard)
		p.Proposed = true
		p.MustEvict = pods[uid] == nil || interferes(&pods[uid].Spec, s.spec)
		node.Pods = append(node.Pods, p)
		delete(holders, uid)
	}
	for uid, holder := range holders {
		if holder.Priority >= s.pod.Priority || !settled(holder) || pods[uid] != nil && !s.frees(pods[uid]) {
			continue
		}
		node.Pods = append(node.Pods, s.candidate(uid, pods[uid], holder, guard))
	}
	node.Budgets = guard.allowed
	return node, true
}

// candidate tells what is known of a pod that may have to leave: its object, its hold of GPU memory, or neither.
func (s *survey) candidate(uid gpu.PodUID, pod *corev1.Pod, holder *ledger.Allocation, guard *guard) preemption.Pod {
	out := preemption.Pod{UID: uid, BudgetsUnknown: holder == nil}
	if pod != nil {
		known := protocol.Pod(pod)
		out.Priority, out.Terminating, out.Requests = known.Priority, known.Leaving, s.takesOf(pod)
		if holder != nil {
			out.Budgets = guard.of(pod)
		}
	}
	if holder != nil {
		out.Priority, out.Terminating = holder.Priority, holder.Leaving
		if settled(holder) {
			out.Placement = holder.Placement
		}
	}
	if pod != nil && !s.frees(pod) {
		out.Placement, out.Requests = nil, nil
	}
	return out
}

// frees reports whether the node has more room once the pod is deleted.
func (s *survey) frees(pod *corev1.Pod) bool {
	return !protocol.Overdue(pod, s.now) && !protocol.IsMirror(pod)
}

// settled says whether the holder's going surely frees the card that it is placed on: of others kube-scheduler may not
// know that they are on the node, or nobody knows on which card.
func settled(holder *ledger.Allocation) bool { return holder.State == ledger.Bound && !holder.Presumed }

// podsOf returns the live pods of a node, and takes what they have, and what nominated pods of equal or higher priority
// are to get, off what is free.
func (s *survey) podsOf(name string, free preemption.Amounts) map[gpu.PodUID]*corev1.Pod {
	pods := map[gpu.PodUID]*corev1.Pod{}
	for _, pod := range s.pods.onNode(name) {
		if pod.Spec.NodeName != "" {
			pods[gpu.PodUID(pod.UID)] = pod
		} else if nominee := protocol.Pod(pod); nominee.UID == s.pod.UID || nominee.Priority < s.pod.Priority {
			continue
		}
		for i, taken := range s.takesOf(pod) {
			free[i] -= taken
		}
	}
	return pods
}

// takesOf is what a slim pod takes of its node.
func (s *survey) takesOf(pod *corev1.Pod) preemption.Amounts {
	return s.takes(pod.Spec.Resources.Requests)
}

// takes is what a pod with these requests takes of its node.
func (s *survey) takes(requests corev1.ResourceList) preemption.Amounts {
	out := s.amounts(requests)
	out[len(out)-1] = 1 // The pod's own place.
	return out
}

// maxAmount keeps sums over a node's pods within 64 bits, whatever they ask for.
const maxAmount = 1 << 52

// amounts puts a list into the order of the preemptor's resources.
func (s *survey) amounts(list corev1.ResourceList) preemption.Amounts {
	out := make(preemption.Amounts, len(s.resources))
	for i, name := range s.resources {
		quantity := list[name]
		switch {
		case quantity.CmpInt64(maxAmount) >= 0:
			out[i] = maxAmount
		case name == corev1.ResourceCPU:
			out[i] = min(quantity.MilliValue(), maxAmount)
		default:
			out[i] = quantity.Value()
		}
	}
	return out
}

// guard numbers the disruption budgets that are met with on one node.
type guard struct {
	book    *budgetBook
	numbers map[*policyv1.PodDisruptionBudget]int
	allowed []int
}

func (g *guard) of(pod *corev1.Pod) []int {
	var out []int
	for _, budget := range g.book.of(pod) {
		number, known := g.numbers[budget]
		if !known {
			if g.numbers == nil {
				g.numbers = map[*policyv1.PodDisruptionBudget]int{}
			}
			number = len(g.allowed)
			g.numbers[budget] = number
			g.allowed = append(g.allowed, int(budget.Status.DisruptionsAllowed))
		}
		out = append(out, number)
	}
	return out
}

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

// Preempt corrects the victims of kube-scheduler's proposal for a pod, node by node, so that their eviction frees a
// card. It omits the nodes on which no card can be freed. It has no side effects: kube-scheduler chooses the node and
// evicts the victims.
func (c *Cluster) Preempt(ctx context.Context, pod *corev1.Pod, proposed map[string]preemption.Victims) (map[string]preemption.Victims, error) {
	if neverPreempts(pod) {
		return nil, nil
	}
	if c.gangs.waits(pod) {
		return nil, nil // Pods would be evicted for one member of a gang that may never become whole.
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

// survey collects the input of the decision about nodes for one preemptor.
type survey struct {
	*Cluster
	pod  gpu.Pod
	spec *corev1.PodSpec
	// resources are the resources that the preemptor requests, and pods as the last one. All Amounts have this order.
	resources []corev1.ResourceName
	request   preemption.Request
	book      budgetBook
	now       time.Time
}

// newSurvey returns a survey for a pod with these requests.
func (c *Cluster) newSurvey(pod *corev1.Pod, requests corev1.ResourceList) *survey {
	s := &survey{Cluster: c, pod: protocol.Pod(pod), spec: &pod.Spec, book: budgetBook{lister: c.budgets}, now: c.Clock.Now()}
	for name := range requests {
		s.resources = append(s.resources, name)
	}
	s.resources = append(s.resources, corev1.ResourcePods)
	s.request = preemption.Request{Memory: s.pod.Request, Resources: s.takes(requests)}
	return s
}

// choose returns the victims on one node. It returns false if the node is not a candidate.
func (s *survey) choose(name string, proposal preemption.Victims) (preemption.Victims, bool) {
	node, ok := s.node(name, proposal)
	if !ok {
		return preemption.Victims{}, false
	}
	return preemption.Choose(node, s.request)
}

// node collects the input of the decision about one node. It returns false if no eviction can help there.
func (s *survey) node(name string, proposal preemption.Victims) (preemption.Node, bool) {
	standing, reason := s.ledger.Availability(name, s.pod)
	if reason.Unresolvable() {
		return preemption.Node{}, false
	}
	object, err := s.nodes.Get(name)
	if err != nil {
		return preemption.Node{}, false // The node was deleted in the meantime.
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
			continue // The proposal names the pod twice.
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

// candidate describes a potential victim. Its object, its allocation, or both may be unknown (nil).
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

// frees reports whether the deletion of the pod makes room on the node.
func (s *survey) frees(pod *corev1.Pod) bool {
	return !protocol.Overdue(pod, s.now) && !protocol.IsMirror(pod)
}

// settled reports whether the end of the pod certainly frees the card of its allocation. For an assumed allocation,
// kube-scheduler may not know that the pod is on the node. For a presumed allocation, the card is unknown.
func settled(holder *ledger.Allocation) bool { return holder.State == ledger.Bound && !holder.Presumed }

// podsOf returns the live pods of a node. It subtracts from free what they use, and what nominated pods of equal or
// higher priority are about to use.
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

// takesOf returns what a pod, as the cache keeps it, uses of its node.
func (s *survey) takesOf(pod *corev1.Pod) preemption.Amounts {
	return s.takes(pod.Spec.Resources.Requests)
}

// takes returns what a pod with these requests uses of its node.
func (s *survey) takes(requests corev1.ResourceList) preemption.Amounts {
	out := s.amounts(requests)
	out[len(out)-1] = 1 // The pod itself counts as one pod.
	return out
}

// maxAmount keeps the sums over a node's pods within 64 bits, for any requests.
const maxAmount = 1 << 52

// amounts converts a resource list to the order of the preemptor's resources.
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

// guard numbers the disruption budgets of one node's pods.
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

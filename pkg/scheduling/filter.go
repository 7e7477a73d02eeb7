package scheduling

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Filter returns the candidate nodes whose cards have room for the pod, or the best of them (see Options.FilterBest). For a
// single pod it creates no allocation, for a member of a group it can make the
// group's plan. A pod that asks for no GPU memory passes on every node, unless its group rejects it.
func (s *Scheduler) Filter(object *corev1.Pod, nodes []string) (FilterResult, error) {
	pod := s.podInfo(object)
	if pod.RequestError != "" {
		s.requeue.ForgetRejection(pod.UID) // No memory that comes free helps it.
		s.preemptors.Unblock(pod.UID)
		return FilterResult{Nodes: nodes, Message: pod.RequestError}, nil
	}
	s.failures.SchedulerSeen(pod.Namespace, s.Clock.Now())
	if s.fair.awaitsTurn(pod.Pod) {
		return FilterResult{Nodes: nodes, Message: reasons.AwaitsTurn}, nil
	}
	s.recordTry(pod, nodes)
	if result, decided := s.groups.filter(pod, nodes); decided {
		return result, nil
	}
	if pod.Request == 0 {
		return FilterResult{Nodes: nodes, Passed: everyNode(nodes)}, nil
	}
	if err := s.cache.Ready(); err != nil {
		return FilterResult{}, err
	}
	c := &filterCall{
		pod: pod, FilterResult: FilterResult{Nodes: nodes, Demand: pod.Demand()}, now: s.Clock.Now(),
		seen: s.requeue.Revision(), onlyNominated: len(nodes) == 1 && s.nominator.Nominated(pod.UID, nodes[0]),
	}
	s.findNodes(c)
	if len(c.Passed) > 0 {
		s.recordPass(c)
	} else {
		s.recordRejection(c)
	}
	return c.FilterResult, nil
}

// podInfo returns the pod of a call: what the cache has, if it has the pod in the same state.
func (s *Scheduler) podInfo(object *corev1.Pod) *clustercache.PodInfo {
	if pod, known := s.cache.Pod(object.Namespace, object.Name); known && pod.IsOf(object) {
		return pod
	}
	return clustercache.NewPodInfo(object)
}

// filterCall is a filter call for a single pod, with its result.
type filterCall struct {
	pod *clustercache.PodInfo
	now time.Time
	// seen is the revision of the requeuer when the call began.
	seen uint64
	// onlyNominated is true if the only candidate is the node to which the pod was nominated because it was outside a sample. If the pod doesn't fit
	// it, kube-scheduler continues with other nodes.
	onlyNominated bool
	FilterResult
	// fitting is the number of nodes that fit.
	fitting int
	// nominatesOutside is true if the pod is about to be nominated to a node outside the sample.
	nominatesOutside bool
}

// findNodes finds the nodes that pass. If the pod fits none, it gives up the place that fair sharing has reserved for it, if that helps. Otherwise
// it is nominated to a node outside the sample, or groups give way to it.
func (s *Scheduler) findNodes(c *filterCall) {
	s.fit(c)
	if len(c.Passed) == 0 && s.fitsOutsidePlace(c.pod.Pod, c.Nodes) && s.fair.giveUpPlace(c.pod.UID) {
		s.fit(c)
	}
	if len(c.Passed) > 0 || c.onlyNominated {
		return
	}
	c.nominatesOutside = s.nominator.Request(c.pod, c.Nodes)
	if c.nominatesOutside || s.ledger.NeedsTurn(c.pod.Pod) {
		return
	}
	if s.displace(c.pod, c.Nodes) {
		s.fit(c)
	}
}

// displace ends plans of groups of lower priority if the pod then fits one of the nodes, and keeps this place for the pod. It reports whether it did so.
// Otherwise the groups could take the place again: before it binds the pod, kube-scheduler makes the filter call for its next pod, which is often a
// member of these groups.
func (s *Scheduler) displace(pod *clustercache.PodInfo, nodes []string) bool {
	if len(nodes) == 0 {
		return false
	}
	node, ok := s.groups.manager.Displace(pod.Pod, nodes, s.Clock.Now())
	if !ok {
		return false
	}
	s.preemptors.TakePlace(pod, node)
	s.binder.Release(pod.UID)
	s.groups.act()
	klog.Background().Info("Memory that was reserved for groups is given to another pod",
		"pod", klog.KRef(pod.Namespace, pod.Name), "priority", pod.Priority, "node", node)
	return true
}

// recordRejection records that no node passes, and what later evictions for the pod need.
func (s *Scheduler) recordRejection(c *filterCall) {
	c.ReservedFor = s.reservedFor(c.pod.Pod, c.Nodes, c.Reasons)
	s.requeue.Rejected(c.pod.Pod, c.Nodes, c.seen)
	s.nominator.Rejected(c.pod.UID, c.Nodes)
	switch {
	case c.nominatesOutside:
		s.preemptors.Unblock(c.pod.UID) // No pod is evicted for it meanwhile.
	case !c.pod.NeverPreempts && !s.ledger.NeedsTurn(c.pod.Pod):
		s.preemptors.Rejected(c.pod.Pod, c.pod.NominatedNode, c.full(), c.now)
	}
}

// recordPass records that nodes pass.
func (s *Scheduler) recordPass(c *filterCall) {
	// If a later step rejects the nominated node, the pod is requeued, since other nodes may fit.
	s.requeue.Passed(c.pod.UID, c.onlyNominated || len(c.Passed) < c.fitting)
	s.preemptors.Unblock(c.pod.UID)
	s.nominator.Passed(c.pod.UID)
	if c.Reasons == nil || len(c.Passed) == 1 { // kube-scheduler doesn't call prioritize for a single node.
		s.addTentative(c.pod.Pod, c.Names(), c.now)
	}
}

// reservedFor returns the label of the item for which memory or other resources are reserved that the pod would get otherwise;
// empty if that is the reason of no node.
func (s *Scheduler) reservedFor(pod gpu.Pod, nodes []string, why []reasons.Reason) string {
	var reserved []string
	for i, reason := range why {
		if reason == reasons.Reserved || reason == reasons.ResourcesReserved {
			reserved = append(reserved, nodes[i])
		}
	}
	return s.ledger.ReservedFor(pod, reserved)
}

// fitsOutsidePlace reports whether the pod fits one of the candidate nodes, if fair sharing has reserved a place for it on another node. If it
// doesn't fit, it keeps its place: the candidate nodes may be a sample, and the next sample may contain the node of its place.
func (s *Scheduler) fitsOutsidePlace(pod gpu.Pod, nodes []string) (fits bool) {
	if s.fair == nil {
		return false
	}
	pod.UID = "" // The ledger has no allocation and no reservation for this UID. So other nodes can fit, and the place counts as used.
	_, fits = s.ledger.FirstFit(pod, nodes)
	return fits
}

// fit sets the call's result to what the candidate nodes have for the pod at present: either all nodes that fit and the reasons of the others, or
// only the best nodes.
func (s *Scheduler) fit(c *filterCall) {
	// With few candidate nodes a shorter answer saves nothing, and the full answer is useful to users and other extenders.
	c.Passed, c.Reasons = s.rank(c.pod.Pod, c.Nodes, c.now)
	c.fitting = s.reportReasons(c.Reasons)
	if s.FilterBest == 0 || len(c.Nodes) <= s.few() || s.requeue.NameAll(c.pod.UID) {
		return
	}
	c.Passed = placement.Best(c.Passed, s.FilterBest)
	if c.fitting > 0 {
		// kube-scheduler uses the reasons only if no node fits (pkg/scheduler/schedule_one.go, schedulePod): for the pod's
		// Event, and to find the nodes on which preemption could help.
		c.Reasons = nil
	}
}

// rank checks whether the pod fits each node. It returns the nodes that it fits, in order, and the reason of every node. Tentative placements of
// other pods count as allocated, see addTentative.
func (s *Scheduler) rank(pod gpu.Pod, nodes []string, now time.Time) (fitting []placement.Candidate, results []reasons.Reason) {
	view := s.view()
	if s.FilterBest > 0 {
		view.TentativeAt = now
	}
	fitting, results, tentative := s.ledger.Rank(view, pod, nodes)
	if tentative && len(fitting) == 0 {
		// Not every tentative placement becomes an allocation. A pod that fits nowhere else may try such a node.
		view.TentativeAt = time.Time{}
		fitting, results, _ = s.ledger.Rank(view, pod, nodes)
	}
	return fitting, results
}

// recordTry records that kube-scheduler offers the pod these nodes, if it may have evicted pods for it. It evicts none for a group that isn't
// whole, see Preempt.
func (s *Scheduler) recordTry(pod *clustercache.PodInfo, nodes []string) {
	if pod.Request > 0 && s.cache.Ready() == nil && !s.ledger.NeedsTurn(pod.Pod) &&
		!s.nominator.Nominated(pod.UID, pod.NominatedNode) && !s.groups.incomplete(pod) {
		s.preemptors.KeepOfferedNode(pod.Pod, pod.NominatedNode, nodes, s.Clock.Now())
	}
}

// addTentative records a tentative placement of the pod on the named nodes. It records none if there are more nodes than
// few: each of them is then too unlikely to get the pod.
func (s *Scheduler) addTentative(pod gpu.Pod, nodes []string, now time.Time) {
	if s.FilterBest > 0 && len(nodes) > 0 && len(nodes) <= s.few() {
		s.ledger.AddTentative(pod, nodes, now)
	}
}

// few returns the maximum number of candidate nodes for which Filter's answer covers every node.
func (s *Scheduler) few() int { return max(s.FilterBest, s.FilterBestAbove) }

// reportReasons reports to the observer the number of nodes with each result, and returns how many nodes fit.
func (s *Scheduler) reportReasons(results []reasons.Reason) (fitting int) {
	var counts reasons.Counts
	for _, reason := range results {
		counts[reason]++
	}
	for reason, n := range counts {
		if n > 0 {
			s.Observer.Filtered(reasons.Reason(reason), n)
		}
	}
	return counts[reasons.Fits]
}

func everyNode(nodes []string) []placement.Candidate {
	fit := make([]placement.Candidate, len(nodes))
	for i := range fit {
		fit[i].Node = i
	}
	return fit
}

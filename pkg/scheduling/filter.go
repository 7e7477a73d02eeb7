package scheduling

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Filter returns the candidate nodes whose cards have room for the pod, or the best of them (see Options.FilterBest). For a
// single pod it creates no allocation, unless groups give way to the pod (groups.displace). For a member of a group it can make the
// group's plan. A pod that asks for no GPU memory passes on every node, unless its group rejects it.
func (s *Scheduler) Filter(object *corev1.Pod, nodes []string) (FilterResult, error) {
	pod, err := checkRequest(object)
	if err != nil {
		s.requeue.ForgetRejection(gpu.PodUID(object.UID)) // No memory that comes free helps it.
		s.defragmenter.Forget(gpu.PodUID(object.UID))
		return FilterResult{Nodes: nodes, Message: err.Error()}, nil
	}
	s.failures.Tried(s.Clock.Now())
	if s.fair.awaitsTurn(pod) {
		return FilterResult{Nodes: nodes, Message: reasons.AwaitsTurn}, nil
	}
	s.recordTry(object, pod, nodes)
	if result, decided := s.groups.filter(object, nodes); decided {
		return result, nil
	}
	if pod.Request == 0 {
		return FilterResult{Nodes: nodes, Passed: everyNode(nodes)}, nil
	}
	if err := s.cache.Ready(); err != nil {
		return FilterResult{}, err
	}
	c := &filterCall{
		object: object, pod: pod, FilterResult: FilterResult{Nodes: nodes}, now: s.Clock.Now(),
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

// filterCall is a filter call for a single pod, with its result.
type filterCall struct {
	object *corev1.Pod
	pod    gpu.Pod
	now    time.Time
	// seen is the revision of the requeuer when the call began.
	seen uint64
	// onlyNominated is true if the only candidate is the node to which the pod was nominated because it was outside a sample. If the pod doesn't fit
	// it, kube-scheduler continues with other nodes.
	onlyNominated bool
	FilterResult
	// fitting is the number of nodes that fit.
	fitting int
	// elsewhere is true if the pod is about to be nominated to a node outside the sample.
	elsewhere bool
}

// findNodes finds the nodes that pass. If the pod fits none, it gives up the place that fair sharing has reserved for it, if that helps. Otherwise
// it is nominated to a node outside the sample, or groups give way to it.
func (s *Scheduler) findNodes(c *filterCall) {
	s.fitAll(c)
	if len(c.Passed) == 0 && s.fitsOutsidePlace(c.pod, c.Nodes) {
		if s.fair.giveUpPlace(c.pod.UID) {
			s.fitAll(c)
		}
	}
	if len(c.Passed) > 0 || c.onlyNominated {
		return
	}
	c.elsewhere = s.nominator.Request(c.object, c.Nodes)
	if c.elsewhere || s.ledger.NeedsTurn(c.pod) {
		return
	}
	if s.groups.displace(c.pod, c.Nodes) {
		s.fitAll(c)
	}
}

// fitAll sets the call's result to what the candidate nodes have for the pod at present.
func (s *Scheduler) fitAll(c *filterCall) {
	c.FilterResult, c.fitting = s.fit(c.pod, c.Nodes, c.now)
}

// recordRejection records that no node passes, and what later evictions for the pod need.
func (s *Scheduler) recordRejection(c *filterCall) {
	c.ReservedFor = s.reservedFor(c.pod, c.Nodes, c.Reasons)
	s.requeue.Rejected(c.pod, len(c.Nodes), c.seen)
	s.nominator.Rejected(c.pod.UID, c.Nodes)
	switch {
	case c.elsewhere:
		s.defragmenter.Forget(c.pod.UID) // No pod is evicted for it meanwhile.
	case !clustercache.NeverPreempts(c.object) && !s.ledger.NeedsTurn(c.pod):
		s.defragmenter.Rejected(c.pod, c.object.Status.NominatedNodeName, c.full(), c.now)
	}
}

// recordPass records that nodes pass.
func (s *Scheduler) recordPass(c *filterCall) {
	// If a later step rejects the nominated node, the pod is requeued, since other nodes may fit.
	s.requeue.Passed(c.pod.UID, c.onlyNominated || len(c.Passed) < c.fitting)
	s.defragmenter.Forget(c.pod.UID)
	s.nominator.Passed(c.pod.UID)
	if c.Reasons == nil || len(c.Passed) == 1 { // kube-scheduler doesn't call prioritize for a single node.
		s.addTentative(c.pod, c.Names(), c.now)
	}
}

// checkRequest returns the pod, or why it gets no node: it is too large, or no node can give it what it asks for.
func checkRequest(object *corev1.Pod) (gpu.Pod, error) {
	if err := protocol.CheckSize(object); err != nil {
		return gpu.Pod{}, err
	}
	return protocol.Pod(object), protocol.CheckRequest(object)
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
	if len(reserved) == 0 {
		return ""
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
	s.ledger.ForEachFit(pod, nodes, func(_ string, reason reasons.Reason) { fits = fits || reason == reasons.Fits })
	return fits
}

// fit checks the pod against each node. It returns either all nodes that fit and the reasons of the others, or only the best
// nodes. It also returns the number of nodes that fit.
func (s *Scheduler) fit(pod gpu.Pod, nodes []string, now time.Time) (result FilterResult, fitting int) {
	result.Nodes, result.Demand = nodes, pod.Demand()
	// With few candidate nodes a shorter answer saves nothing, and the full answer is useful to users and other extenders.
	every := s.FilterBest == 0 || len(nodes) <= s.few() || s.requeue.NameAll(pod.UID)
	if every {
		result.Passed = make([]placement.Candidate, 0, len(nodes))
		result.Reasons = s.rank(pod, nodes, now, func(c placement.Candidate) { result.Passed = append(result.Passed, c) })
		return result, s.reportReasons(result.Reasons)
	}
	best := placement.Best{K: s.FilterBest}
	result.Reasons = s.rank(pod, nodes, now, best.Add)
	result.Passed = best.Candidates()
	fitting = s.reportReasons(result.Reasons)
	if fitting > 0 {
		// kube-scheduler uses the reasons only if no node fits (pkg/scheduler/schedule_one.go, schedulePod): for the pod's
		// Event, and to find the nodes on which preemption could help.
		result.Reasons = nil
	}
	return result, fitting
}

// rank checks whether the pod fits each node. It calls fits for each node that it fits, and returns the reason of every
// node. Tentative placements of other pods count as allocated, see addTentative.
func (s *Scheduler) rank(pod gpu.Pod, nodes []string, now time.Time, fits func(placement.Candidate)) []reasons.Reason {
	results, none := make([]reasons.Reason, len(nodes)), true
	visit := func(i int, suits placement.Suitability, reason reasons.Reason) {
		results[i] = reason
		if reason == reasons.Fits {
			none = false
			fits(placement.Candidate{Node: i, Suits: suits})
		}
	}
	view := s.view()
	if s.FilterBest > 0 {
		view.TentativeAt = now
	}
	tentative := s.ledger.Rank(view, pod, nodes, visit)
	if tentative && none {
		// Not every tentative placement becomes an allocation. A pod that fits nowhere else may try such a node.
		view.TentativeAt = time.Time{}
		s.ledger.Rank(view, pod, nodes, visit)
	}
	return results
}

// recordTry records that kube-scheduler offers the pod these nodes, if it may have evicted pods for it. It evicts none for a group that isn't
// whole, see Preempt.
func (s *Scheduler) recordTry(object *corev1.Pod, pod gpu.Pod, nodes []string) {
	nominated := object.Status.NominatedNodeName
	if pod.Request > 0 && s.cache.Ready() == nil && !s.ledger.NeedsTurn(pod) && !s.nominator.Nominated(pod.UID, nominated) && !s.groups.incomplete(object) {
		s.preemptors.Tried(pod, nominated, nodes, s.Clock.Now())
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

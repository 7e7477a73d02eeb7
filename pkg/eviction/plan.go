package eviction

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eligibility"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/protocol"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// plan is the choice of the pods to evict from cards of a node, for a preemptor.
type plan struct {
	preemptor
	// where is what the pod is to get.
	where gpu.Placement
	// evictions are those of the victims that aren't terminating yet.
	evictions []Victim
}

// choosePlan chooses the victims on one of the candidate nodes. It returns false if not enough cards can be freed within all budgets.
func (d *Defragmenter) choosePlan(ctx context.Context, pod *clustercache.PodInfo, candidates []string) (plan, bool) {
	var names []string
	var nodes []preemption.Node
	outranked := d.Ledger.Outranked(pod.Pod, candidates)
	if len(outranked) > maxPlans { // Different nodes each time, so that the last ones are compared too.
		rand.Shuffle(len(outranked), func(i, j int) { outranked[i], outranked[j] = outranked[j], outranked[i] })
	}
	s := NewSurvey(d.Ledger, d.Cache, pod, min(len(outranked), maxPlans), d.Clock.Now())
	for _, name := range outranked {
		if len(nodes) == maxPlans {
			break
		}
		node, ok := s.node(name, preemption.Victims{})
		if ok && preemption.Fragmented(node, s.request) && d.Ledger.FitsResources(name, []gpu.Pod{pod.Pod}, nil, nil) {
			node.Pods = slices.DeleteFunc(node.Pods, func(p preemption.Pod) bool { return !p.Terminating && !d.executor.mayEvict(p.UID, p.Budgets) })
			names, nodes = append(names, name), append(nodes, node)
		}
	}
	chosen, ok := preemption.ChooseNode(ctx, nodes, s.request, s.work)
	if !ok || chosen.Violations > 0 {
		return plan{}, false
	}
	out := plan{
		preemptor: preemptor{pod: pod.Pod, node: names[chosen.Node], victims: chosen.Pods, own: true, nominated: pod.NominatedNode},
		where:     pod.Demand().On(slices.Sorted(slices.Values(chosen.Cards))...),
	}
	for _, uid := range chosen.Pods {
		if _, victim, held := d.Ledger.Lookup(uid); held && !victim.Leaving {
			out.evictions = append(out.evictions, Victim{
				Pods: IDs(victim.Pod), For: IDs(pod.Pod)[0], Cause: ByPriority,
				What: fmt.Sprintf("Evicted from GPU %s of node %s", victim.Placement, out.node), Why: " of higher priority",
			})
		}
	}
	out.checking = len(out.evictions) > 0
	return out, true
}

// nominationValid reports whether the pod can still get a card of the node to which it is nominated.
func (d *Defragmenter) nominationValid(pod *clustercache.PodInfo, name string) bool {
	object, ok := d.Cache.Node(name)
	if !ok {
		return false // The node was deleted in the meantime.
	}
	available, reason := d.Ledger.Availability(name, pod.Pod, nil)
	if reason.Unresolvable() {
		return false
	}
	node := eligibility.Node{Object: object}
	if reasons := eligibility.Closed(object, protocol.ParseNode(object)); len(reasons) > 0 {
		node.Closed = reasons[0].Text
	}
	leaving := slices.ContainsFunc(d.Cache.PodsOn(name), func(other *clustercache.PodInfo) bool {
		return other.Node != "" && other.Request > 0 && other.Leaving && other.Priority < pod.Priority && !other.Overdue(d.Clock.Now())
	})
	return node.NominationValid(eligibility.Parse(pod.Constraints), available.Cards, pod.Demand(), leaving)
}

// fits reports whether the pod would find a card on one of the nodes.
func fits(l *ledger.Ledger, pod gpu.Pod, nodes ...string) (fits bool) {
	l.ForEachFit(pod, nodes, func(_ string, reason reasons.Reason) { fits = fits || reason == reasons.Fits })
	return fits
}

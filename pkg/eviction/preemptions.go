package eviction

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/placement"
	"github.com/gpushare/gpushare/pkg/preemption"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// This file follows the preemptions of kube-scheduler: while the victims of a preemptor are leaving, its place is kept, and no further victims are
// proposed. For one pod, kube-scheduler's calls are:
//
//	preempt    its answer names victims, which kube-scheduler evicts      Proposed remembers them
//	filter     with the node that they are leaving, before all are gone   KeepOfferedNode keeps the place there
//	preempt    in the same cycle, since filter has rejected the node      VictimsSuffice says that no further victims are needed
//	preempt    without that, and the answer would repeat the last one     KeepIfRepeated keeps the place, and says the same

// proposal is the answer to a preempt call: the victims on each node. kube-scheduler evicts those of one node.
type proposal struct {
	at      time.Time
	victims map[string]preemption.Victims
}

// Proposed records the answer to a preempt call for the pod. kube-scheduler evicts pods for it, so none are evicted here.
func (ps *Preemptors) Proposed(uid gpu.PodUID, victims map[string]preemption.Victims) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	ps.proposals[uid] = proposal{ps.Clock.Now(), victims}
}

// proposed returns the victims that were proposed for the pod a short time ago, by node.
func (ps *Preemptors) proposed(uid gpu.PodUID) map[string]preemption.Victims {
	if p, ok := ps.proposals[uid]; ok && ps.Clock.Since(p.at) < cycle {
		return p.victims
	}
	return nil
}

// KeepIfRepeated reports whether an answer to a preempt call for the pod would name, on one of its nodes, only pods that the last answer has named
// there and that are leaving or gone by now. Then kube-scheduler has evicted them and hasn't seen it. It must not evict them again: it could wait for
// an end that it has seen meanwhile (kubernetes/kubernetes#141694). Without victims it retries the pod when it sees their end. It clears the
// nomination, so the place is kept here.
func (ps *Preemptors) KeepIfRepeated(pod gpu.Pod, answer map[string]preemption.Victims) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	last, nominated := ps.proposed(pod.UID), ""
	if known, ok := ps.Cache.Pod(pod.Namespace, pod.Name); ok {
		nominated = known.NominatedNode
	}
	for _, node := range slices.Concat([]string{nominated}, slices.Sorted(maps.Keys(last))) {
		again := answer[node].Pods
		if len(again) == 0 || slices.ContainsFunc(again, func(uid gpu.PodUID) bool {
			return !slices.Contains(last[node].Pods, uid) || ps.phase(node, uid) == running
		}) {
			continue
		}
		switch p := ps.all[pod.UID]; {
		case p != nil && (p.node == node || p.evicting()): // The Executor evicts its victims.
			p.awaited = true
		case ps.isPending(pod):
			ps.reserve(&preemptor{pod: pod, node: node, nominated: node, victims: again, awaited: true})
		default:
			return false // Nothing would make kube-scheduler retry it.
		}
		return true
	}
	return false
}

// KeepOfferedNode records a filter call for the pod, which kube-scheduler has nominated to a node or to none, with the candidate nodes. It must be called
// before filter reads the ledger.
//
// kube-scheduler can see the end of a victim before this process does. It then offers the nominated node to the pod again. If filter rejects
// it, kube-scheduler preempts on another node, or clears the nomination. Therefore the place is kept here, with the victims that are still leaving.
// If the nominated node isn't among the candidates, kube-scheduler itself rejects it, and the pod must be able to preempt elsewhere.
//
// Without a nomination the node is found otherwise. If the watch lags so much that it shows neither nomination nor deletion, the last proposal
// says where kube-scheduler evicts pods. A new leader may find that an answer of the former one has cleared the nomination: then it is the
// candidate node whose pods leave too little room for kube-scheduler to offer it, unless it has seen the end of some of them.
func (ps *Preemptors) KeepOfferedNode(pod gpu.Pod, nominated string, nodes []string, at time.Time) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.preemptorOf(pod, nominated, nodes)
	if p == nil || p.evicting() || !slices.Contains(nodes, p.node) {
		return
	}
	if victims := ps.leavingFor(pod, p.node); len(victims) > 0 && (ps.all[pod.UID] == p || ps.isPending(pod)) {
		p.victims, p.own, p.freedAt, p.offered = victims, false, time.Time{}, at
		ps.reserve(p)
	}
}

// preemptorOf returns the preemptor of the pod: the present one, unless the pod was nominated to another node since; else a new one, which isn't kept yet.
// It is nil if there is no node.
func (ps *Preemptors) preemptorOf(pod gpu.Pod, nominated string, nodes []string) *preemptor {
	present := ps.all[pod.UID]
	if present == nil && nominated == "" {
		nominated = cmp.Or(ps.onlyProposed(pod.UID, nodes), ps.seenEnd(pod, nodes))
	}
	if nominated == "" || present != nil && nominated == present.nominated {
		return present
	}
	node := strings.Clone(nominated) // The name may be a slice of the whole request.
	return &preemptor{pod: pod, node: node, nominated: node}
}

// onlyProposed returns the candidate node for which victims were just proposed; none if there are several.
func (ps *Preemptors) onlyProposed(uid gpu.PodUID, nodes []string) (only string) {
	for node := range ps.proposed(uid) {
		switch {
		case !slices.Contains(nodes, node):
		case only != "":
			return ""
		default:
			only = node
		}
	}
	return only
}

// seenEnd returns the candidate node on which pods are leaving for the pod whose end kube-scheduler has seen; none if there is no such node.
func (ps *Preemptors) seenEnd(pod gpu.Pod, nodes []string) string {
	for _, node := range ps.Ledger.NodesAheadOfWatch(pod, nodes) {
		if len(ps.leavingFor(pod, node)) > 0 {
			return node
		}
	}
	return ""
}

// isPending reports whether the watch shows the pod as pending. Nothing is kept of other pods, whose end isn't reported.
func (ps *Preemptors) isPending(pod gpu.Pod) bool {
	known := ps.cached(pod)
	return known != nil && known.Pending != nil
}

// leavingFor returns the pods of lower priority that are leaving the node, or have just been proposed as victims, if the pod doesn't fit the
// node now but does once they are gone.
func (ps *Preemptors) leavingFor(pod gpu.Pod, node string) (victims []gpu.PodUID) {
	available, reason := ps.Ledger.Availability(node, pod, nil)
	if !reason.Resolvable() {
		return nil
	}
	proposed := ps.proposed(pod.UID)[node].Pods
	for i := range available.Allocations {
		a := &available.Allocations[i]
		if a.Priority < pod.Priority && (ps.phase(node, a.UID) == departing || slices.Contains(proposed, a.UID)) {
			placement.Release(available.Cards, a.Placement)
			victims = append(victims, a.UID)
		}
	}
	if placement.Fit(available.Cards, pod.Demand()) != reasons.Fits {
		return nil
	}
	return victims
}

// VictimsSuffice reports whether the pod needs no further victims, because pods are leaving a node for it. After a preemption by kube-scheduler, it
// reports true once for each filter call that offered this node, which it remembers as answered.
func (ps *Preemptors) VictimsSuffice(uid gpu.PodUID) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.all[uid]
	if p == nil {
		return false
	}
	awaits := ps.Clock.Since(p.offered) < cycle || p.evicting() && ps.slowest(p) != gone
	p.offered, p.awaited = time.Time{}, p.awaited || awaits
	return awaits
}

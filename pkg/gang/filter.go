package gang

import (
	"hash/maphash"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// FilterResult is the answer to a filter call for a member.
type FilterResult struct {
	// Alone is true if the pod is placed like a pod without a group.
	Alone bool
	// Nodes are the candidate nodes that the member may use, in the order of the candidates.
	Nodes []string
	// Reason is why Nodes is empty.
	Reason reasons.Group
	// Outside is the node of the member's place, if that is outside the sample and no node of the sample has room.
	Outside string
}

// Filter answers a filter call for a member of a group. The candidates can be a sample of all nodes that the member can use
// (percentageOfNodesToScore). The group's plan can use all. A member whose place is outside the sample moves to a node of the sample if one has
// room. The caller must not change the nodes afterwards.
func (mgr *Manager) Filter(uid gpu.PodUID, candidates, all []string, now time.Time) FilterResult {
	set := fingerprint(mgr.seed, all) // Without the lock, since these can be thousands.
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil {
		if len(mgr.unknownPods) >= maxUnknown {
			clear(mgr.unknownPods) // A watch that merely lags doesn't leave so many.
		}
		mgr.unknownPods[uid] = struct{}{}
		return FilterResult{Reason: reasons.GroupUnknown}
	}
	if m.Cardless {
		return FilterResult{Alone: true}
	}
	if !mgr.leading {
		return FilterResult{Reason: reasons.GroupStarting}
	}
	r := m.run
	result := mgr.filter(r, m, candidates, mgr.intern(set, all), now)
	r.parked = r.parked || !result.Alone && len(result.Nodes) == 0
	return result
}

func (mgr *Manager) filter(r *run, m *member, names []string, all *candidates, now time.Time) FilterResult {
	switch {
	case r.phase == PhaseRunning:
		return FilterResult{Alone: true}
	case m.problem() != "":
		return FilterResult{Reason: mgr.reportProblem(m)}
	case m.Size != r.size():
		reason := r.disagree()
		mgr.recordEvent(r, true, EventInvalid, reason.Text())
		return FilterResult{Reason: reason}
	case r.phase == PhaseEvicting:
		return FilterResult{Reason: reasons.GroupEvicting}
	case r.phase == PhaseBinding:
		if m.place == r.plan.last && m.place.state < memberBinding {
			return mgr.nodesFromPlan(m.place, names, all, now) // Its earlier call was cancelled.
		}
		return FilterResult{Reason: reasons.GroupBinding}
	case r.plan == nil && !r.enough():
		return FilterResult{Reason: mgr.reason(r, m)}
	case r.plan == nil && mgr.updatePause(r, now):
		return FilterResult{Reason: r.waitsFor}
	}
	if r.plan == nil || !r.key.Native { // In later calls of a native group's cycle the members before count as bound.
		mgr.offer(r, m, all, now)
	}
	if r.plan == nil && !mgr.tryPlan(r, now) {
		return FilterResult{Reason: r.waitsFor}
	}
	if m.place == nil {
		return FilterResult{Reason: reasons.GroupSurplus}
	}
	return mgr.nodesFromPlan(m.place, names, all, now)
}

// nodesFromPlan answers from the plan. If the planned node isn't among the names (because they are a sample, or for a reason that only
// kube-scheduler knows, such as a member that it has placed there), the member moves to a node that is.
func (mgr *Manager) nodesFromPlan(pm *plannedMember, names []string, all *candidates, now time.Time) FilterResult {
	r := pm.run
	if r.key.Native && r.phase == PhasePlanned {
		mgr.extend(r, now)
	}
	if mgr.takeLate(pm, now) {
		mgr.effects.Requeue = true
		return FilterResult{Reason: reasons.GroupTimedOut}
	}
	if pm.node == "" {
		return FilterResult{Nodes: names}
	}
	if slices.Contains(names, pm.node) || mgr.movePlace(pm, names, now) {
		pm.passed = true
		return FilterResult{Nodes: []string{pm.node}}
	}
	if !mgr.keepPlace(pm, now) {
		return FilterResult{Reason: reasons.GroupPlaceLost}
	}
	if slices.Contains(all.names, pm.node) {
		return FilterResult{Reason: reasons.GroupOutsideSample, Outside: pm.node}
	}
	if r.phase == PhaseBinding {
		return FilterResult{Reason: reasons.GroupUnplaced} // The member's place stays reserved until the plan ends.
	}
	if mgr.exchangePlace(pm, names, now) {
		pm.passed = true
		return FilterResult{Nodes: []string{pm.node}}
	}
	mgr.abandonPlan(r, reasons.GroupUnplaced, now)
	return FilterResult{Reason: reasons.GroupUnplaced}
}

// movePlace moves the member's reservation to one of the nodes, or to another card of its node. It reports whether one
// has room.
func (mgr *Manager) movePlace(pm *plannedMember, nodes []string, now time.Time) bool {
	node, ok := mgr.Ledger.Move(ledger.Request{Pod: pm.Pod, Nodes: nodes}, mgr.View, now)
	if ok {
		mgr.setPlace(pm, node)
	}
	return ok
}

// exchangePlace gives the member the place of an equal one, on one of the nodes, and that one the member's place. It reports whether there is an
// equal member that kube-scheduler has not placed yet. The plan doesn't know what constraints such as spreading make of their order.
func (mgr *Manager) exchangePlace(pm *plannedMember, nodes []string, now time.Time) bool {
	offered := make(map[string]bool, len(nodes))
	for _, node := range nodes {
		offered[node] = true
	}
	for _, o := range pm.run.plan.members {
		if o.passed || !offered[o.node] || o.asked != pm.asked || o.Template != pm.Template {
			continue
		}
		places, _ := mgr.Ledger.ReserveAll([]ledger.Request{{Pod: pm.Pod, Nodes: []string{o.node}}, {Pod: o.Pod, Nodes: []string{pm.node}}},
			[][]gpu.PodUID{{pm.UID, o.UID}}, mgr.View, now)
		if places == nil {
			return false
		}
		mgr.setPlace(pm, places[0].Node)
		mgr.setPlace(o, places[1].Node)
		return true
	}
	return false
}

// reportProblem returns the reason why the member can't be placed, even if all memory is free. It records an Event, but not about a
// PodGroup that doesn't exist: the watch may report the pod before the PodGroup, and kube-scheduler doesn't try pods whose PodGroup is
// missing.
func (mgr *Manager) reportProblem(m *member) reasons.Group {
	problem := m.problem()
	if _, exists := mgr.podGroups[m.Gang]; m.reportedProblem != problem && (exists || !m.Gang.Native) {
		m.reportedProblem = problem
		mgr.effects.Events = append(mgr.effects.Events, Event{m.Pod, true, EventInvalid, "The pod can't be counted as a member: " + problem})
	}
	return reasons.GroupInvalid(problem)
}

// offer holds the candidate nodes for the members of one template.
type offer struct {
	// nodes are the latest candidate nodes; nil after a failed plan. at is when the latest were offered.
	nodes *candidates
	at    time.Time
}

func (o offer) known() bool { return o.nodes != nil && len(o.nodes.names) > 0 }

// offer records the candidate nodes of a member. All members of its template share them.
func (mgr *Manager) offer(r *run, m *member, nodes *candidates, now time.Time) {
	if r.offers[m.Template].nodes != nodes && r.needs != nil {
		r.needs.requests = nil // They name other nodes now.
	}
	r.offers[m.Template] = offer{nodes, now}
}

// candidates is a set of candidate nodes. Equal sets are one value, whatever their order.
type candidates struct {
	fingerprint uint64
	names       []string
}

// fingerprint identifies a set of names, independent of their order: kube-scheduler finds candidate nodes concurrently.
func fingerprint(seed maphash.Seed, names []string) uint64 {
	sum := uint64(len(names))
	for _, name := range names {
		sum += maphash.String(seed, name)
	}
	return sum
}

// maxSets is the number of candidate sets after which the Manager forgets which ones are equal.
const maxSets = 256

// intern returns the set with this fingerprint.
func (mgr *Manager) intern(fingerprint uint64, names []string) *candidates {
	if known := mgr.sets[fingerprint]; known != nil {
		return known
	}
	if len(mgr.sets) >= maxSets {
		clear(mgr.sets)
	}
	set := &candidates{fingerprint, names}
	mgr.sets[fingerprint] = set
	return set
}

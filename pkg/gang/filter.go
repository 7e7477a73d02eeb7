package gang

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// FilterResult is the answer to a filter call for a member.
type FilterResult struct {
	// AsSingle is true if the pod is to be treated like a pod without a gang.
	AsSingle bool
	// Nodes are the candidate nodes that the member may use, in the order of the candidates.
	Nodes []string
	// Reason is why there are none.
	Reason Reason
}

// Filter answers a filter call for a member of a gang. The caller must not change candidates afterwards.
func (mgr *Manager) Filter(uid gpu.PodUID, candidates []string, now time.Time) FilterResult {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil {
		mgr.rememberUnknown(uid, now)
		return FilterResult{Reason: Unknown}
	}
	result := mgr.filter(m, candidates, now)
	m.rejected = !result.AsSingle && len(result.Nodes) == 0
	return result
}

// rememberUnknown records a filter call for a pod that the watch has not reported yet.
func (mgr *Manager) rememberUnknown(uid gpu.PodUID, now time.Time) {
	if _, again := mgr.unknownPods[uid]; !again && len(mgr.unknownPods) >= maxUnknown {
		for other := range mgr.unknownPods {
			delete(mgr.unknownPods, other) // Any of them: a watch that merely lags doesn't leave so many.
			break
		}
	}
	mgr.unknownPods[uid] = now
}

func (mgr *Manager) filter(m *member, candidates []string, now time.Time) FilterResult {
	if m.Cardless {
		return FilterResult{AsSingle: true}
	}
	g := mgr.gangs[m.Gang]
	counts := g.updateState(now)
	if reason := mgr.invalid(g, m); reason != nil {
		return FilterResult{Reason: *reason}
	}
	exist := counts.existing()
	switch {
	case g.whole:
		return FilterResult{AsSingle: true}
	case g.evicting:
		return FilterResult{Reason: Evicting}
	case g.binding():
		return FilterResult{Reason: Binding}
	case exist < g.size:
		if counts.tooFewAskForCards(g.size) {
			mgr.recordEvent(g, true, EventIncomplete, fmt.Sprintf("The group needs %d members that ask for GPU cards, %d do, and %d ask for none: those don't count",
				g.size, exist+counts.ineligible, counts.cardless))
		}
		return FilterResult{Reason: incomplete(exist, g.size)}
	case now.Before(g.notBefore):
		return FilterResult{Reason: Paused}
	}
	if g.candidates == nil {
		g.candidates = map[string][]string{}
	}
	g.candidates[m.Template] = mgr.shareCandidates(candidates)
	if g.plan == nil {
		if reason, ok := mgr.makePlan(g, counts, now); !ok {
			return FilterResult{Reason: reason}
		}
	}
	return mgr.nodesFromPlan(g, m, candidates, now)
}

// nodesFromPlan answers from the plan. If the planned node isn't a candidate, for reasons that only kube-scheduler
// knows, the member moves to another one.
func (mgr *Manager) nodesFromPlan(g *gang, m *member, candidates []string, now time.Time) FilterResult {
	pm := g.plan.members[m.UID]
	switch {
	case pm == nil:
		return FilterResult{Reason: Surplus}
	case mgr.rejectOnceMore(g.plan, pm, now):
		mgr.requeue(pm.node)
		return FilterResult{Reason: TimedOut}
	case pm.node == "":
		return FilterResult{Nodes: candidates}
	case slices.Contains(candidates, pm.node):
		return FilterResult{Nodes: []string{pm.node}}
	}
	if pm.reserved {
		if node, ok := mgr.Ledger.Move(ledger.Request{Pod: m.Pod, Nodes: candidates}, mgr.View, nil, now); ok {
			pm.node = node
			return FilterResult{Nodes: []string{node}}
		}
	}
	mgr.recordEvent(g, true, EventNotBound, Unplaced.Text)
	mgr.dropPlan(g, Unplaced, now, true)
	return FilterResult{Reason: Unplaced}
}

// invalid returns the reason why the gang, or this member, can't be placed however much memory is free; nil if there is
// none.
func (mgr *Manager) invalid(g *gang, m *member) *Reason {
	switch {
	case m.Problem != "":
		reason := invalid(m.Problem)
		if m.reportedProblem != m.Problem {
			m.reportedProblem = m.Problem
			mgr.effects.Events = append(mgr.effects.Events, Event{m.Pod, true, EventInvalid, "The pod can't be counted as a member: " + m.Problem})
		}
		return &reason
	case g.size == 0:
		mgr.recordEvent(g, true, EventInvalid, Disagree.Text)
		return &Disagree
	}
	return nil
}

// shareCandidates returns the latest list if it is equal, so that equal lists are stored once.
func (mgr *Manager) shareCandidates(candidates []string) []string {
	if !slices.Equal(mgr.lastCandidates, candidates) {
		mgr.lastCandidates = candidates
	}
	return mgr.lastCandidates
}

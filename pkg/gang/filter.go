package gang

import (
	"fmt"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// FilterResult is the answer to a filter call for a member.
type Answer struct {
	// AsSingle is true if the pod is to be treated like a pod without a gang.
	Free bool
	// Nodes are the candidate nodes that the member may use.
	Nodes []string
	// Reason is why there are none.
	Why Reason
}

// Filter answers a filter call for a member of a gang. The caller must not change candidates afterwards.
func (mgr *Book) Filter(uid gpu.PodUID, candidates []string, now time.Time) Answer {
	mgr.mu.Lock()
	defer mgr.mu.Unlock()
	m := mgr.members[uid]
	if m == nil {
		mgr.rememberUnknown(uid, now)
		return Answer{Why: Unknown}
	}
	result := mgr.filter(m, candidates, now)
	m.rejected = !result.Free && len(result.Nodes) == 0
	return result
}

// rememberUnknown records a filter call for a pod that the watch has not reported yet.
func (mgr *Book) rememberUnknown(uid gpu.PodUID, now time.Time) {
	if _, again := mgr.unknownPods[uid]; !again && len(mgr.unknownPods) >= maxUnknown {
		for other := range mgr.unknownPods {
			delete(mgr.unknownPods, other) // Any of them: a watch that merely lags doesn't leave so many.
			break
		}
	}
	mgr.unknownPods[uid] = now
}

func (mgr *Book) filter(m *member, candidates []string, now time.Time) Answer {
	if m.Cardless {
		return Answer{Free: true}
	}
	g := mgr.gangs[m.Group]
	counts := g.updateState(now)
	if reason := mgr.invalid(g, m); reason != nil {
		return Answer{Why: *reason}
	}
	exist := counts.existing()
	switch {
	case g.whole:
		return Answer{Free: true}
	case g.evicting:
		return Answer{Why: Evicting}
	case g.binding():
		return Answer{Why: Binding}
	case exist < g.size:
		if counts.tooFewAskForCards(g.size) {
			mgr.recordEvent(g, true, EventIncomplete, fmt.Sprintf("The group needs %d members that ask for GPU cards, %d do, and %d ask for none: those don't count",
				g.size, exist+counts.ineligible, counts.cardless))
		}
		return Answer{Why: incomplete(exist, g.size)}
	case now.Before(g.notBefore):
		return Answer{Why: Paused}
	}
	if g.candidates == nil {
		g.candidates = map[string][]string{}
	}
	g.candidates[m.Template] = mgr.shareCandidates(candidates)
	if g.plan == nil {
		if reason, ok := mgr.makePlan(g, counts, now); !ok {
			return Answer{Why: reason}
		}
	}
	return mgr.nodesFromPlan(g, m, candidates, now)
}

// nodesFromPlan answers from the plan. If the planned node isn't a candidate, for reasons that only kube-scheduler
// knows, the member moves to another one.
func (mgr *Book) nodesFromPlan(g *gang, m *member, candidates []string, now time.Time) Answer {
	pm := g.plan.members[m.UID]
	switch {
	case pm == nil:
		return Answer{Why: Surplus}
	case mgr.rejectOnceMore(g.plan, pm, now):
		mgr.requeue(pm.node)
		return Answer{Why: TimedOut}
	case pm.node == "":
		return Answer{Nodes: candidates}
	case slices.Contains(candidates, pm.node):
		return Answer{Nodes: []string{pm.node}}
	}
	if pm.reserved {
		if node, ok := mgr.Ledger.Move(ledger.Want{Pod: m.Pod, Nodes: candidates}, mgr.View, now); ok {
			pm.node = node
			return Answer{Nodes: []string{node}}
		}
	}
	mgr.recordEvent(g, true, EventNotBound, Unplaced.Text)
	mgr.dropPlan(g, Unplaced, now, true)
	return Answer{Why: Unplaced}
}

// invalid returns the reason why the gang, or this member, can't be placed however much memory is free; nil if there is
// none.
func (mgr *Book) invalid(g *gang, m *member) *Reason {
	switch {
	case m.Problem != "":
		reason := invalid(m.Problem)
		if m.reportedProblem != m.Problem {
			m.reportedProblem = m.Problem
			mgr.effects.Notices = append(mgr.effects.Notices, Notice{m.Pod, true, EventInvalid, "The pod can't be counted as a member: " + m.Problem})
		}
		return &reason
	case g.size == 0:
		mgr.recordEvent(g, true, EventInvalid, Disagree.Text)
		return &Disagree
	}
	return nil
}

// shareCandidates returns the latest list if it is equal, so that equal lists are stored once.
func (mgr *Book) shareCandidates(candidates []string) []string {
	if !slices.Equal(mgr.lastCandidates, candidates) {
		mgr.lastCandidates = candidates
	}
	return mgr.lastCandidates
}

package dispatch

import (
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// Search finds the pods that may be evicted for units that need room. It is a snapshot of the Manager's state: in a large cluster the search
// takes long, so it is made without the Manager's lock. Hold checks its result.
type Search struct {
	*standings
	// Attempt is the number of the attempt for which pods are searched.
	Attempt uint64
	need    reclaim.Need
	// constraints are those of the pods in need, one after another. nodes knows which nodes they can use: that takes long if they are new.
	constraints []unique.Handle[string]
	nodes       Nodes
	groups      Groups
	// evicting is Options.Evicting.
	evicting func(gpu.PodUID) bool
	// since is when this process began to lead.
	since, now     time.Time
	minRuntime     time.Duration
	priorityCutoff int32
}

// search returns a search for an attempt.
func (m *Manager) search(attempt uint64, s *standings, now time.Time) *Search {
	return &Search{
		standings: s, Attempt: attempt, nodes: m.Nodes, groups: m.Groups, evicting: m.Evicting, since: m.reclaims.since, now: now,
		minRuntime: m.MinRuntime, priorityCutoff: m.PriorityCutoff,
	}
}

// Need returns the units that need room, and the pods that may be evicted for them.
func (s *Search) Need() reclaim.Need {
	need, i := s.need, 0
	for _, u := range need.Units {
		for j := range u.Pods {
			u.Pods[j].Nodes = s.nodes.Names(s.constraints[i])
			i++
		}
	}
	need.Tenants = s.excess()
	need.Victims = victims(need.Tenants, s.candidates())
	return need
}

// leaves reports whether the pod leaves soon, because it is being deleted or is about to be.
func (s *Search) leaves(p *allocatedPod) bool {
	return p.LeavesSoon() || s.evicting(p.UID)
}

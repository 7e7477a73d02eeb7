package dispatch

import (
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/reclaim"
)

// Search finds the pods that may be evicted for items that need room. It is a snapshot of the Manager's state: in a large cluster the search
// takes long, so it is made without the Manager's lock. Hold checks its result.
type Search struct {
	*standings
	options *Options
	need    reclaim.Need
	// kinds are the kinds of items that need room. They pause if they get none.
	kinds []tenantKind
	// constraints are those of the pods in need, one after another: it takes long to find the nodes for new ones.
	constraints []unique.Handle[string]
	// since is when this process began to lead.
	since, now time.Time
}

// search returns a search without items.
func (m *Manager) search(s *standings) *Search {
	return &Search{standings: s, options: &m.Options, since: m.reclaims.since, now: m.now}
}

// Need returns the items that need room, and the pods that may be evicted for them.
func (s *Search) Need() reclaim.Need {
	need, i := s.need, 0
	for _, it := range need.Items {
		for j := range it.Pods {
			it.Pods[j].Nodes = s.options.Nodes.UsableNodes(s.constraints[i])
			i++
		}
	}
	need.Tenants = s.excess()
	need.Victims = victims(need.Tenants, s.candidates())
	return need
}

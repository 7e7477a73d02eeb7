package dispatch

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// Search finds the pods that may be evicted for items that need room. It is a snapshot of the Manager's state: in a large cluster the search
// takes long, so it is made without the Manager's lock. Hold checks its result.
type Search struct {
	*standings
	options *Options
	wanted  []searchedItem
	// since is when this process began to lead.
	since, now time.Time
}

// searchedItem is an item that needs room. If it gets none, its kind pauses.
type searchedItem struct {
	tenantKind
	id   string
	pods []*Pod
}

// search returns a search without items.
func (m *Manager) search(s *standings) *Search {
	return &Search{standings: s, options: &m.Options, since: m.reclaims.since, now: m.now}
}

// Need returns the items that need room, and the pods that may be evicted for them.
func (s *Search) Need() reclaim.Need {
	need := reclaim.Need{Tenants: s.excess()}
	need.Victims = victims(need.Tenants, s.candidates())
	for _, it := range s.wanted {
		out := reclaim.Item{Tenant: it.tenant, ID: it.id}
		for _, p := range it.pods { // It takes long to find the nodes for new constraints.
			out.Pods = append(out.Pods, reclaim.Pod{Pod: p.Pod, Nodes: s.options.Nodes.UsableNodes(p.Constraints)})
		}
		need.Items = append(need.Items, out)
	}
	return need
}

// candidates returns the pods and groups that may be evicted if their tenants keep their shares without them. A surplus member is a candidate
// by itself and with its group.
func (s *Search) candidates() (candidates []reclaim.Victim) {
	groups, spared, cutoff := map[gang.Key][]*allocatedPod{}, map[gang.Key]bool{}, s.options.PriorityCutoff
	add := func(pods ...*allocatedPod) {
		slices.SortFunc(pods, func(a, b *allocatedPod) int { return cmp.Compare(a.UID, b.UID) })
		c := reclaim.Victim{Tenant: pods[0].countedFor, Started: s.now}
		for _, p := range pods {
			c.Pods, c.Started = append(c.Pods, p.Pod.Pod), earlier(c.Started, p.startedAt(s.since))
		}
		if s.now.Sub(c.Started) >= s.options.MinRuntime {
			candidates = append(candidates, c)
		}
	}
	for _, p := range s.allocated {
		inGroup := p.Group != (gang.Key{})
		if inGroup && (p.Node == "" || p.Priority >= cutoff) { // A member isn't bound yet, or needs no turn.
			spared[p.Group] = true
		}
		switch {
		case !s.counts(p) || p.Priority >= cutoff:
		case inGroup:
			groups[p.Group] = append(groups[p.Group], p)
		default:
			add(p)
		}
	}
	for key, pods := range groups {
		surplus := map[gpu.PodUID]bool{} // They can be thousands.
		for _, uid := range s.options.Groups.Surplus(key) {
			surplus[uid] = true
		}
		for _, p := range pods {
			if surplus[p.UID] {
				add(p)
			}
		}
		if !spared[key] && (len(pods) > 1 || !surplus[pods[0].UID]) {
			add(pods...)
		}
	}
	return candidates
}

// counts reports whether the pod is bound and counts for a tenant. One that leaves soon, because it is being deleted or is about to be, counts as gone.
func (s *Search) counts(p *allocatedPod) bool {
	return p.Node != "" && p.counted > 0 && !p.LeavesSoon() && !s.options.Evicting(p.UID)
}

// victims returns the candidates whose eviction leaves their tenants their share, the newest first.
func victims(tenants map[string]reclaim.Tenant, candidates []reclaim.Victim) []reclaim.Victim {
	victims := slices.DeleteFunc(candidates, func(v reclaim.Victim) bool { return v.Memory() > tenants[v.Tenant].Excess })
	slices.SortFunc(victims, func(a, b reclaim.Victim) int {
		return cmp.Or(b.Started.Compare(a.Started), cmp.Compare(a.Pods[0].UID, b.Pods[0].UID), cmp.Compare(len(a.Pods), len(b.Pods)))
	})
	return victims
}

// excess returns the memory and the share of each tenant, and how much memory of its bound pods can be evicted.
func (s *Search) excess() map[string]reclaim.Tenant {
	running, out := map[string]gpu.Memory{}, map[string]reclaim.Tenant{}
	for _, p := range s.allocated {
		if s.counts(p) {
			running[p.countedFor] = running[p.countedFor].Add(p.counted)
		}
	}
	for _, t := range s.tenants {
		out[t.Name] = reclaim.Tenant{Share: t.Share, Allocated: t.Allocated, Excess: running[t.Name].Sub(t.Share)}
	}
	return out
}

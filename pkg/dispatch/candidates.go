package dispatch

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// candidates returns the pods and groups that may be evicted if their tenants keep their shares without them. A surplus member is a candidate
// by itself and with its group.
func (s *Search) candidates() (candidates []reclaim.Victim) {
	groups, spared, surplus := map[gang.Key][]*allocatedPod{}, map[gang.Key]bool{}, s.surplus()
	add := func(pods []*allocatedPod) {
		slices.SortFunc(pods, func(a, b *allocatedPod) int { return cmp.Compare(a.UID, b.UID) })
		c := reclaim.Victim{Tenant: pods[0].countedFor, Started: pods[0].startedAt(s.since)}
		for _, p := range pods {
			c.Pods = append(c.Pods, p.Pod.Pod)
			if started := p.startedAt(s.since); started.Before(c.Started) {
				c.Started = started
			}
		}
		if s.now.Sub(c.Started) >= s.minRuntime {
			candidates = append(candidates, c)
		}
	}
	for _, p := range s.allocated {
		inGroup := p.Group != (gang.Key{})
		if surplus[p.UID] && !s.leaves(p) && p.counted > 0 && p.Priority < s.priorityCutoff {
			add([]*allocatedPod{p})
		}
		switch {
		case inGroup && (p.charged || p.Node != "" && p.Priority >= s.priorityCutoff): // A member isn't bound yet, or needs no turn.
			spared[p.Group] = true
		case p.Node == "" || s.leaves(p) || p.counted == 0 || p.Priority >= s.priorityCutoff:
		case inGroup:
			groups[p.Group] = append(groups[p.Group], p)
		default:
			add([]*allocatedPod{p})
		}
	}
	for key, pods := range groups {
		if !spared[key] && (len(pods) > 1 || !surplus[pods[0].UID]) {
			add(pods)
		}
	}
	return candidates
}

// surplus returns the bound members of groups that are candidates by themselves.
func (s *Search) surplus() map[gpu.PodUID]bool {
	surplus, asked := map[gpu.PodUID]bool{}, map[gang.Key]bool{}
	for _, p := range s.allocated {
		if p.Node == "" || p.Group == (gang.Key{}) || asked[p.Group] {
			continue
		}
		asked[p.Group] = true
		for _, uid := range s.groups.Surplus(p.Group) {
			surplus[uid] = true
		}
	}
	return surplus
}

// victims returns the candidates whose eviction leaves their tenants their share, the newest first.
func victims(tenants map[string]reclaim.Tenant, candidates []reclaim.Victim) []reclaim.Victim {
	victims := slices.DeleteFunc(candidates, func(v reclaim.Victim) bool { return v.Memory() > tenants[v.Tenant].Excess })
	slices.SortFunc(victims, func(a, b reclaim.Victim) int {
		return cmp.Or(b.Started.Compare(a.Started), cmp.Compare(a.Pods[0].UID, b.Pods[0].UID), cmp.Compare(len(a.Pods), len(b.Pods)))
	})
	return victims
}

// excess returns the memory and the share of each tenant, and how much memory of its bound pods can be evicted. Pods that are being deleted
// count as gone.
func (s *Search) excess() map[string]reclaim.Tenant {
	out := map[string]reclaim.Tenant{}
	for _, t := range s.tenants {
		out[t.Name] = reclaim.Tenant{Share: t.Share, Allocated: t.Allocated}
	}
	running := map[string]gpu.Memory{}
	for _, p := range s.allocated {
		if p.Node != "" && !s.leaves(p) && p.counted > 0 {
			running[p.countedFor] = running[p.countedFor].Add(p.counted)
		}
	}
	for name, amount := range running {
		t := out[name]
		t.Excess = amount.Sub(t.Share)
		out[name] = t
	}
	return out
}

package dispatch

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reclaim"
)

// candidate is a pod or a group that may be evicted if its tenant keeps its share without it.
type candidate struct {
	reclaim.Victim
	// pods are in the order of Victim.Pods.
	pods []*pod
}

// candidates returns the pods and groups that may be evicted if their tenants keep their shares without them.
func (m *Manager) candidates(now time.Time) (candidates []candidate) {
	groups, spared := map[gang.Key][]*pod{}, map[gang.Key]bool{}
	add := func(pods []*pod) {
		slices.SortFunc(pods, func(a, b *pod) int { return cmp.Compare(a.UID, b.UID) })
		c := candidate{reclaim.Victim{Tenant: pods[0].countedFor, Started: pods[0].startedAt(now)}, pods}
		for _, p := range pods {
			c.Pods = append(c.Pods, p.Pod.Pod)
			if started := p.startedAt(now); started.Before(c.Started) {
				c.Started = started
			}
		}
		if now.Sub(c.Started) >= m.MinRuntime {
			candidates = append(candidates, c)
		}
	}
	for _, p := range m.pods {
		inGroup := p.Group != (gang.Key{})
		switch {
		case p.Ended:
		case inGroup && (p.charged() || p.Node != "" && p.Priority >= m.PriorityCutoff): // A member isn't bound yet, or needs no turn.
			spared[p.Group] = true
		case p.Node == "" || p.Leaving || p.counted == 0 || p.Priority >= m.PriorityCutoff:
		case inGroup:
			groups[p.Group] = append(groups[p.Group], p)
		default:
			add([]*pod{p})
		}
	}
	for key, pods := range groups {
		if !spared[key] {
			add(pods)
		}
	}
	return candidates
}

// victims returns the candidates whose eviction leaves their tenants their share, there or elsewhere, the newest first.
func victims(standings map[string]reclaim.Standing, candidates []candidate) (victims []reclaim.Victim) {
	none := reclaim.NewTally(standings)
	for i := range candidates {
		if v := &candidates[i].Victim; none.WithinExcess(v) || none.CanMove(v) {
			victims = append(victims, *v)
		}
	}
	slices.SortFunc(victims, func(a, b reclaim.Victim) int {
		return cmp.Or(b.Started.Compare(a.Started), cmp.Compare(a.Pods[0].UID, b.Pods[0].UID))
	})
	return victims
}

// excess returns the memory and the share of each tenant, and how much memory of its bound pods can be evicted. Pods that are being deleted
// count as gone.
func (m *Manager) excess(tenants []Tenant) map[string]reclaim.Standing {
	out := map[string]reclaim.Standing{}
	for _, t := range tenants {
		out[t.Name] = reclaim.Standing{Share: t.Share, Allocated: t.Allocated}
	}
	running := map[string]gpu.Memory{}
	for _, p := range m.pods {
		if p.Node != "" && !p.Leaving && p.counted > 0 {
			running[p.countedFor] = running[p.countedFor].Add(p.counted)
		}
	}
	for name, amount := range running {
		s := out[name]
		s.Excess = amount.Sub(s.Share)
		out[name] = s
	}
	return out
}

// startedAt returns when the pod was bound, as far as this process knows. Its result stays the same if the clock is set.
func (p *pod) startedAt(now time.Time) time.Time {
	if p.started.IsZero() {
		p.started = now
		if !p.Bound.IsZero() {
			p.started = now.Add(-max(now.Sub(p.Bound), 0))
		}
	}
	return p.started
}

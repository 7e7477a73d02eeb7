package dispatch

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
)

// keptFor is how long the memory of a pod that has ended is kept for its tenant: longer than most controllers take to create the next pod.
const keptFor = 10 * time.Second

// kept is the memory of a pod that has ended while others wait. It is for the next pod of its tenant, and for tenants that would still have less
// than this one. Without it, a tenant whose pods run for minutes would lose its share to others, pod by pod, and need evictions to get it back.
type kept struct {
	tenant string
	// Pod is the pod that has ended, with a UID of its own, and node where its memory is. It has an allocation and a charge until then.
	*Pod
	node  string
	until time.Time
}

// noteEnd notes that the memory of a bound pod of the tenant is free now.
func (m *Manager) noteEnd(p *pod, tenant string) {
	ended := *p.Pod
	ended.UID = "kept-" + p.UID
	m.ended = append(m.ended, &kept{tenant, &ended, p.Node, m.now.Add(keptFor)})
}

// keepEnded keeps the memory of the pods that have ended since the latest round.
func (m *Manager) keepEnded(now time.Time) {
	if len(m.ended) == 0 {
		return
	}
	others := false
	for _, u := range m.units {
		others = others || !u.paused
	}
	for _, k := range m.ended {
		if others && now.Before(k.until) && m.reserveKept(k, now) {
			m.queue.Charge(k.tenant, k.Request)
			m.kept = append(m.kept, k)
		}
	}
	m.ended = nil
}

// reserveKept makes the ledger keep the memory, if it is free.
func (m *Manager) reserveKept(k *kept, now time.Time) bool {
	places, _ := m.Ledger.ReserveAll([]ledger.Request{{Pod: k.Pod.Pod, Nodes: []string{k.node}}}, nil, m.View, now)
	if places != nil {
		m.Ledger.Own(ledger.Granted, k.UID, time.Time{})
	}
	return places != nil
}

// endKept ends what was kept for long enough, isn't there any more, or can't be used by the tenant's next pod.
func (m *Manager) endKept(now time.Time) {
	m.kept = slices.DeleteFunc(m.kept, func(k *kept) bool {
		if _, _, allocated := m.Ledger.Lookup(k.UID); allocated && now.Before(k.until) {
			return false
		}
		m.GiveUpPlace(k.UID)
		m.queue.Release(k.tenant, k.Request)
		m.setTerms(k.tenant) // Its namespaces may be gone.
		return true
	})
}

// takeKept reserves places for the pods of a unit that has no room elsewhere, where memory is kept that its tenant can take: its own, or else that
// of tenants that would not have less than its own.
func (r *round) takeKept(u *unit) (places []ledger.ChosenNode) {
	own := r.tenant(u.item.Tenant)
	if len(r.m.kept) == 0 || own.triedKept[u.kind] || own.effort >= r.tenantEffort {
		return nil
	}
	places = r.takeKeptWhere(u, func(k *kept) bool { return k.tenant == u.item.Tenant })
	if places != nil {
		return places
	}
	r.m.nextCame(u.item.Tenant, true, r.now)
	places = r.takeKeptWhere(u, func(k *kept) bool {
		return k.tenant != u.item.Tenant && !r.m.queue.Reaches(u.item.Tenant, u.item.Memory, k.tenant)
	})
	if places == nil {
		if own.triedKept == nil {
			own.triedKept = map[*kind]bool{}
		}
		own.triedKept[u.kind] = true
	}
	return places
}

// takeKeptWhere reserves places for the pods of a unit with the kept memory that the unit may take.
func (r *round) takeKeptWhere(u *unit, mayTake func(*kept) bool) []ledger.ChosenNode {
	var usable []*kept
	var uids []gpu.PodUID
	var nodes []string
	for _, k := range r.m.kept {
		if mayTake(k) {
			usable, uids, nodes = append(usable, k), append(uids, k.UID), append(nodes, k.node)
		}
	}
	slices.Sort(nodes)
	requests := r.m.requestsOn(u, slices.Compact(nodes))
	if requests == nil {
		return nil
	}
	places, _ := r.m.Ledger.ReserveAll(requests, [][]gpu.PodUID{uids}, r.view(), r.now)
	if places == nil {
		return nil
	}
	r.m.kept = slices.DeleteFunc(r.m.kept, func(k *kept) bool {
		if !slices.Contains(usable, k) || r.m.reserveKept(k, r.now) {
			return false
		}
		r.taken = append(r.taken, k) // Its charge ends after the present unit was granted.
		return true
	})
	return places
}

// nextCame ends what is kept for a tenant's next pod, which has come: all of it if the pod found no room, else the oldest.
func (m *Manager) nextCame(tenant string, all bool, now time.Time) {
	for _, k := range m.kept {
		if k.tenant == tenant && now.Before(k.until) {
			k.until = now
			if !all {
				return
			}
		}
	}
}

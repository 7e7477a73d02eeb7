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
	// Pod is the pod that has ended, with a UID of its own. It has an allocation and a charge until then.
	*Pod
	until time.Time
}

// noteEnd notes that the memory of a bound pod of the tenant is free now.
func (m *Manager) noteEnd(p *pod, tenant string) {
	ended := *p.Pod
	ended.UID = "kept-" + p.UID
	m.ended = append(m.ended, &kept{tenant, &ended, m.now.Add(keptFor)})
}

// keepEnded keeps the memory of the pods that have ended since the latest round, if something waits that doesn't pause.
func (m *Manager) keepEnded() {
	if len(m.ended) == 0 {
		return
	}
	others := false
	for _, it := range m.items {
		others = others || it.pause == 0
	}
	for _, k := range m.ended {
		if others && m.now.Before(k.until) && m.reserveKept(k) {
			m.queue.Charge(k.tenant, k.Request)
			m.kept = append(m.kept, k)
		}
	}
	m.ended = nil
}

// reserveKept makes the ledger keep the memory, if it is free.
func (m *Manager) reserveKept(k *kept) bool {
	places, _ := m.Ledger.ReserveAll([]ledger.Request{{Pod: k.Pod.Pod, Nodes: []string{k.Node}}}, nil, m.View, m.now)
	if places != nil {
		m.Ledger.Own(ledger.Granted, k.UID, time.Time{})
	}
	return places != nil
}

// endKept ends what was kept for long enough, isn't there any more, or can't be used by the tenant's next pod.
func (m *Manager) endKept() {
	m.kept = slices.DeleteFunc(m.kept, func(k *kept) bool {
		if _, _, allocated := m.Ledger.Lookup(k.UID); allocated && m.now.Before(k.until) {
			return false
		}
		m.GiveUpPlace(k.UID)
		m.queue.Release(k.tenant, k.Request)
		m.setTerms(k.tenant) // Its namespaces may be gone.
		return true
	})
}

// takeKept reserves places for the pods of an item that has no room elsewhere, where memory is kept that its tenant can take: its own, or else that
// of tenants that would not have less than its own.
func (r *round) takeKept(it *item) (places []ledger.ChosenNode) {
	name, own := it.Tenant, r.tenant(it.Tenant)
	if len(r.m.kept) == 0 || own.triedKept[it.kind] || own.effort >= r.tenantEffort {
		return nil
	}
	places = r.takeKeptWhere(it, func(k *kept) bool { return k.tenant == name })
	if places != nil {
		return places
	}
	r.m.nextCame(name, true)
	places = r.takeKeptWhere(it, func(k *kept) bool { return k.tenant != name && !r.m.queue.Reaches(name, it.Memory, k.tenant) })
	own.triedKept[it.kind] = places == nil
	return places
}

// takeKeptWhere reserves places for the pods of an item with the kept memory that the item may take.
func (r *round) takeKeptWhere(it *item, mayTake func(*kept) bool) []ledger.ChosenNode {
	var uids []gpu.PodUID
	var nodes []string
	for _, k := range r.m.kept {
		if mayTake(k) {
			uids, nodes = append(uids, k.UID), append(nodes, k.Node)
		}
	}
	slices.Sort(nodes)
	places := r.reserve(r.m.requestsOn(it, slices.Compact(nodes)), uids)
	if places == nil {
		return nil
	}
	r.m.kept = slices.DeleteFunc(r.m.kept, func(k *kept) bool {
		if !slices.Contains(uids, k.UID) || r.m.reserveKept(k) {
			return false
		}
		r.taken = append(r.taken, k) // Its charge ends after the present item was granted.
		return true
	})
	return places
}

// nextCame ends what is kept for a tenant's next pod, which has come: all of it if the pod found no room, else the oldest.
func (m *Manager) nextCame(tenant string, all bool) {
	for _, k := range m.kept {
		if k.tenant == tenant && m.now.Before(k.until) {
			k.until = m.now
			if !all {
				return
			}
		}
	}
}

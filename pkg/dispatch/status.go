package dispatch

import (
	"cmp"
	"slices"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// Tenant is the state of a tenant.
type Tenant struct {
	fairshare.Terms
	Name string
	// Share is what the tenant deserves now, Allocated what its pods have or are granted.
	Share, Allocated gpu.Memory
	// Waiting are the pods that wait for their turn, WaitingMemory is what they request.
	Waiting       int
	WaitingMemory gpu.Memory
	// PassedOver counts those of them that fit nowhere now, and Infeasible those that are no demand.
	PassedOver, Infeasible int
}

// Tenants returns the tenants that have or want something, by name.
func (m *Manager) Tenants() []Tenant {
	m.mu.Lock()
	defer m.mu.Unlock()
	tenants, _ := m.standings()
	slices.SortFunc(tenants, func(a, b Tenant) int { return cmp.Compare(a.Name, b.Name) })
	return tenants
}

// standings returns the tenants in the order of their turns, and the units of each.
func (m *Manager) standings() ([]Tenant, [][]*unit) {
	var tenants []Tenant
	var claims []fairshare.Claim
	var units [][]*unit
	for _, s := range m.queue.Standings() {
		if s.Allocated == 0 && len(s.Waiting) == 0 {
			continue
		}
		t := Tenant{Terms: s.Terms, Name: s.Name, Allocated: s.Allocated}
		claim := fairshare.Claim{Terms: s.Terms, Name: s.Name, Demand: s.Allocated}
		own := make([]*unit, len(s.Waiting))
		for i, item := range s.Waiting {
			u := m.units[item.ID]
			own[i] = u
			t.Waiting, t.WaitingMemory = t.Waiting+len(u.pods), t.WaitingMemory.Add(item.Memory)
			switch m.obstacle(u) {
			case NoRoom:
				t.PassedOver += len(u.pods)
			case NeverFits, Paused:
				t.Infeasible += len(u.pods)
				continue
			}
			claim.Demand = claim.Demand.Add(item.Memory)
		}
		tenants, claims, units = append(tenants, t), append(claims, claim), append(units, own)
	}
	for i, share := range fairshare.Shares(m.Memory(), claims) {
		tenants[i].Share = share
	}
	return tenants, units
}

// Turn is where a pod is in the queue.
type Turn struct {
	Tenant           string
	Share, Allocated gpu.Memory
	// Before counts the tenants that are before the pod's and have pods that wait.
	Before   int
	Obstacle Obstacle
}

// Turns returns the turns of all pods that wait for one.
func (m *Manager) Turns() map[gpu.PodUID]Turn {
	m.mu.Lock()
	defer m.mu.Unlock()
	turns := map[gpu.PodUID]Turn{}
	if !m.leading {
		return turns
	}
	before := 0
	tenants, units := m.standings()
	for i, t := range tenants {
		for _, u := range units[i] {
			for _, p := range u.pods {
				turns[p.UID] = Turn{t.Name, t.Share, t.Allocated, before, m.obstacle(u)}
			}
		}
		if t.Waiting > t.Infeasible {
			before++
		}
	}
	for _, members := range m.members {
		for _, p := range members {
			if p.unit == nil {
				turns[p.UID] = Turn{Tenant: m.namespaces[p.Namespace].Tenant, Obstacle: Incomplete}
			}
		}
	}
	return turns
}

// Snapshot returns the tenants, by name, as they are according to the API server alone. Of the options it uses Ledger, EligibleNodes,
// Memory and PriorityCutoff. Pods that the extender has granted count as waiting until they are bound.
func Snapshot(o Options, namespaces map[string]Namespace, pods []Pod) []Tenant {
	m := New(o)
	for name, ns := range namespaces {
		m.SetNamespace(name, ns)
	}
	for _, pod := range pods {
		m.SetPod(pod)
	}
	for _, u := range m.units {
		if !m.everFits(u) {
			m.noRoom[u.item.Kind] = NeverFits
		}
	}
	return m.Tenants()
}

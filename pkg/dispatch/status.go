package dispatch

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
)

// Tenant is the state of a tenant.
type Tenant struct {
	fairshare.Terms
	Name string
	// Share is the memory that the tenant should have now. Allocated is the memory of its bound and its granted pods.
	Share, Allocated gpu.Memory
	// Waiting counts the pods that wait for their turn. WaitingMemory is the memory that they request.
	Waiting       int
	WaitingMemory gpu.Memory
	// PassedOver counts the waiting pods that fit nowhere now, Infeasible those that don't count for the tenant's demand.
	PassedOver, Infeasible int
	// Before counts the tenants with waiting pods that come before this tenant in the queue.
	Before int
	// Next is the first waiting pod that counts for the demand. If there is none, it is the first waiting pod; zero if no pod waits.
	// Obstacle is why Next isn't granted.
	Next     gpu.Pod
	Obstacle Obstacle
}

// Tenants returns the tenants that have or want something, by name. The list is never nil.
func (m *Manager) Tenants() []Tenant {
	m.mu.Lock()
	defer m.mu.Unlock()
	tenants, _ := m.standings()
	slices.SortFunc(tenants, func(a, b Tenant) int { return cmp.Compare(a.Name, b.Name) })
	return tenants
}

// standings returns the tenants in the order of their turns, and the units of each.
func (m *Manager) standings() ([]Tenant, [][]*unit) {
	tenants := []Tenant{}
	var claims []fairshare.Claim
	var units [][]*unit
	before := 0
	for _, s := range m.queue.Standings() {
		s.Allocated = s.Allocated.Sub(m.reclaims.charged[s.Name])
		if s.Allocated == 0 && len(s.Waiting) == 0 {
			continue
		}
		t := Tenant{Terms: s.Terms, Name: s.Name, Allocated: s.Allocated, Before: before}
		claim := fairshare.Claim{Terms: s.Terms, Name: s.Name, Demand: s.Allocated}
		own := make([]*unit, len(s.Waiting))
		for i, item := range s.Waiting {
			u := item.Value.(*unit)
			own[i] = u
			t.Waiting, t.WaitingMemory = t.Waiting+len(u.pods), t.WaitingMemory.Add(item.Memory)
			obstacle := m.obstacle(u)
			if i == 0 || t.Obstacle.infeasible() && !obstacle.infeasible() {
				t.Next, t.Obstacle = u.pods[0].Pod.Pod, m.shownObstacle(u)
			}
			switch {
			case obstacle.infeasible():
				t.Infeasible += len(u.pods)
				continue
			case obstacle == NoRoom:
				t.PassedOver += len(u.pods)
			}
			claim.Demand = claim.Demand.Add(item.Memory)
		}
		if t.Waiting > t.Infeasible {
			before++
		}
		tenants, claims, units = append(tenants, t), append(claims, claim), append(units, own)
	}
	for i, share := range m.shares(claims, units) {
		tenants[i].Share = share
	}
	return tenants, units
}

// shownObstacle returns the obstacle that users see: MakingRoom if pods are evicted for the unit, otherwise obstacle.
func (m *Manager) shownObstacle(u *unit) Obstacle {
	if m.makesRoom(u) {
		return MakingRoom
	}
	return m.obstacle(u)
}

// Turn is the position of a waiting pod in the queue, and why it isn't granted.
type Turn struct {
	Tenant           string
	Share, Allocated gpu.Memory
	// Before counts the tenants with waiting pods that come before the pod's tenant in the queue.
	Before   int
	Obstacle Obstacle
}

// String returns the sentence that is shown to users.
func (t Turn) String() string {
	if t.Obstacle == Incomplete {
		return "its group isn't complete: it gets its turn when all members exist"
	}
	if t.Obstacle == GateStuck {
		return "it is its turn, but its scheduling gate could not be removed: the extender's log has the error"
	}
	text := fmt.Sprintf("waits for its turn: tenant %s has %d of its share of %d", cmp.Or(t.Tenant, "<none>"), t.Allocated, t.Share)
	return strings.Join(append([]string{text}, waits(t.Before, t.Obstacle)...), "; ")
}

// Reason returns why the tenant's next pod waits, for users; empty if no pod waits.
func (t Tenant) Reason() string {
	if t.Waiting == 0 {
		return ""
	}
	reasons := waits(t.Before, t.Obstacle)
	if len(reasons) == 0 {
		reasons = []string{"its turn is next"}
	}
	return t.Next.String() + ": " + strings.Join(reasons, "; ")
}

// waits returns the reasons why a pod waits: the number of tenants before its own, and the obstacle.
func waits(before int, obstacle Obstacle) (reasons []string) {
	switch {
	case obstacle.infeasible(): // Then the order of the tenants doesn't matter.
	case before == 1:
		reasons = []string{"1 tenant is before it"}
	case before > 1:
		reasons = []string{fmt.Sprintf("%d tenants are before it", before)}
	}
	if text := obstacle.String(); text != "" {
		reasons = append(reasons, text)
	}
	return reasons
}

// Turns returns the turns of all pods that wait for one.
func (m *Manager) Turns() map[gpu.PodUID]Turn {
	m.mu.Lock()
	defer m.mu.Unlock()
	turns := map[gpu.PodUID]Turn{}
	if !m.leading {
		return turns
	}
	tenants, units := m.standings()
	for i, t := range tenants {
		for _, u := range units[i] {
			for _, p := range u.pods {
				turns[p.UID] = Turn{t.Name, t.Share, t.Allocated, t.Before, m.shownObstacle(u)}
			}
		}
	}
	for uid, p := range m.gated {
		if p.gateFailures > 0 {
			turns[uid] = Turn{Tenant: m.namespaces[p.Namespace].Tenant, Obstacle: GateStuck}
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

// DefaultPriorityCutoff is the default of Options.PriorityCutoff: the priority of the class system-cluster-critical.
const DefaultPriorityCutoff = 2_000_000_000

// Snapshot returns the tenants, by name, as they are according to the API server alone. Of the options it uses Ledger, Groups,
// EligibleNodes and PriorityCutoff. Pods that the extender has granted count as waiting until they are bound.
func Snapshot(o Options, namespaces map[string]Namespace, pods []Pod) []Tenant {
	m := New(o)
	for name, ns := range namespaces {
		m.SetNamespace(name, ns)
	}
	for _, pod := range pods {
		m.SetPod(pod)
	}
	m.gatherGroups()
	for _, u := range m.units {
		if !m.everFits(u) {
			u.kind.obstacle = NeverFits
		}
	}
	return m.Tenants()
}

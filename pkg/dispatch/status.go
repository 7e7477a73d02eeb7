package dispatch

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"unique"

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
	s := m.standings()
	m.mu.Unlock()
	m.setShares(s)
	slices.SortFunc(s.tenants, func(a, b Tenant) int { return cmp.Compare(a.Name, b.Name) })
	return s.tenants
}

// standings is the state of all tenants at one moment.
type standings struct {
	// tenants are in the order of their turns. They have no Share before setShares.
	tenants []Tenant
	claims  []fairshare.Claim
	// units are the waiting units of each tenant. demanded is the memory that waits, of the units that count for their tenants' demand.
	units    [][]*unit
	demanded map[demander]gpu.Memory
	// allocated are the pods that have memory.
	allocated []*allocatedPod
	// regions are those for which setShares has computed the shares.
	regions *regions
}

// demander identifies the waiting pods of a tenant, by its position, that have the same constraints.
type demander struct {
	tenant      int
	constraints unique.Handle[string]
}

// standings returns the state of the tenants, without shares.
func (m *Manager) standings() *standings {
	out := &standings{tenants: []Tenant{}, demanded: map[demander]gpu.Memory{}, allocated: m.allocated.snapshot()}
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
			for _, p := range u.pods {
				key := demander{len(out.tenants), p.Constraints}
				out.demanded[key] = out.demanded[key].Add(p.Request)
			}
		}
		if t.Waiting > t.Infeasible {
			before++
		}
		out.tenants, out.claims, out.units = append(out.tenants, t), append(out.claims, claim), append(out.units, own)
	}
	return out
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
	turns := map[gpu.PodUID]Turn{}
	s, waiting := m.waitingTurns(turns)
	if s == nil {
		return turns
	}
	m.setShares(s)
	for _, w := range waiting {
		t := s.tenants[w.tenant]
		turns[w.pod] = Turn{t.Name, t.Share, t.Allocated, t.Before, w.obstacle}
	}
	return turns
}

// waitingTurn is a pod that waits for its turn. tenant is the position of its tenant.
type waitingTurn struct {
	pod      gpu.PodUID
	tenant   int
	obstacle Obstacle
}

// waitingTurns returns the pods that wait for their turn, and sets the turns of those that don't wait for others. It returns nil if this
// process isn't the leader.
func (m *Manager) waitingTurns(turns map[gpu.PodUID]Turn) (s *standings, waiting []waitingTurn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading {
		return nil, nil
	}
	s = m.standings()
	for i, units := range s.units {
		for _, u := range units {
			for _, p := range u.pods {
				waiting = append(waiting, waitingTurn{p.UID, i, m.shownObstacle(u)})
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
	return s, waiting
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

package dispatch

import (
	"cmp"
	"maps"
	"slices"
	"unique"

	"github.com/gpushare/gpushare/pkg/fairshare"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// Tenant is the state of a tenant. Its JSON is that of the page and of kubectl inspect.
type Tenant struct {
	fairshare.Terms
	// Name is that of a namespace, or the value of a label, which is empty for namespaces without the label.
	Name string `json:"name"`
	// Share is the memory that the tenant should have now. Allocated is the memory of its bound and its granted pods.
	Share     gpu.Memory `json:"share"`
	Allocated gpu.Memory `json:"allocated"`
	// Waiting counts the pods that wait for their turn. WaitingMemory is the memory that they request.
	Waiting       int        `json:"waitingPods"`
	WaitingMemory gpu.Memory `json:"waiting"`
	// PassedOver counts the waiting pods that fit nowhere now, Infeasible those that don't count for the tenant's demand.
	PassedOver int `json:"-"`
	Infeasible int `json:"-"`
	// Before counts the tenants with waiting pods that come before this tenant in the queue.
	Before int `json:"-"`
	// Next is the first waiting pod that counts for the demand. If there is none, it is the first waiting pod; zero if no pod waits.
	// Obstacle is why Next isn't granted.
	Next     gpu.Pod          `json:"-"`
	Obstacle reasons.Obstacle `json:"-"`
}

// Tenants returns the tenants that have or want something, by name. The list is never nil.
func (m *Manager) Tenants() []Tenant {
	m.mu.Lock()
	s := m.takeStandings()
	m.mu.Unlock()
	m.setShares(s)
	slices.SortFunc(s.tenants, func(a, b Tenant) int { return cmp.Compare(a.Name, b.Name) })
	return s.tenants
}

// standings is the state of all tenants at one moment.
type standings struct {
	// tenants are in the order of their turns. They have no Share before setShares.
	tenants []Tenant
	// items are the waiting items of each tenant. demanded is the memory that waits, of the items that count for their tenants' demand.
	items    [][]*item
	demanded map[demander]gpu.Memory
	// held is the memory of the places that are held for each tenant.
	held map[string]gpu.Memory
	// allocated are the pods that have memory.
	allocated []*allocatedPod
}

// demander identifies the waiting pods of a tenant, by its position, that have the same constraints.
type demander struct {
	tenant      int
	constraints unique.Handle[string]
}

// takeStandings returns the state of the tenants, without shares.
func (m *Manager) takeStandings() *standings {
	out := &standings{
		tenants: []Tenant{}, demanded: map[demander]gpu.Memory{}, held: map[string]gpu.Memory{},
		allocated: slices.AppendSeq(make([]*allocatedPod, 0, len(m.allocated)), maps.Values(m.allocated)),
	}
	for _, h := range m.reclaims.holds {
		out.held[h.tenant] = out.held[h.tenant].Add(h.memory)
	}
	before := 0
	for _, s := range m.queue.Tenants() {
		t := Tenant{Terms: s.Terms, Name: s.Name, Allocated: s.Allocated.Sub(out.held[s.Name]), Before: before}
		if t.Allocated == 0 && len(s.Waiting) == 0 {
			continue
		}
		own := make([]*item, len(s.Waiting))
		for i, next := range s.Waiting {
			own[i] = next.Value.(*item)
			obstacle := own[i].obstacle()
			m.addWaiting(&t, own[i], obstacle)
			if !obstacle.Infeasible() {
				out.demand(own[i])
			}
		}
		if t.Waiting > t.Infeasible {
			before++
		}
		out.tenants, out.items = append(out.tenants, t), append(out.items, own)
	}
	return out
}

// demand counts what an item of the next tenant demands.
func (s *standings) demand(it *item) {
	add := func(constraints unique.Handle[string], amount gpu.Memory) {
		of := demander{len(s.tenants), constraints}
		s.demanded[of] = s.demanded[of].Add(amount)
	}
	if !it.mixed {
		add(it.constraints, it.Memory)
		return
	}
	for _, p := range it.pods {
		add(p.Constraints, p.Request)
	}
}

// addWaiting counts an item that waits in its tenant's state, behind those before it. obstacle is the item's.
func (m *Manager) addWaiting(t *Tenant, it *item, obstacle reasons.Obstacle) {
	if t.Waiting == 0 || t.Obstacle.Infeasible() && !obstacle.Infeasible() {
		t.Next, t.Obstacle = it.pods[0].Pod.Pod, m.shownObstacle(it)
	}
	t.Waiting, t.WaitingMemory = t.Waiting+len(it.pods), t.WaitingMemory.Add(it.Memory)
	switch {
	case obstacle.Infeasible():
		t.Infeasible += len(it.pods)
	case obstacle == reasons.ObstacleNoRoom:
		t.PassedOver += len(it.pods)
	}
}

// shownObstacle returns the obstacle that users see: ObstacleMakingRoom if pods are evicted for the item, otherwise obstacle.
func (m *Manager) shownObstacle(it *item) reasons.Obstacle {
	if obstacle := it.obstacle(); obstacle != reasons.ObstacleNoRoom || !m.hasHold(it) {
		return obstacle
	}
	return reasons.ObstacleMakingRoom
}

// Reason returns why the tenant's next pod waits, for users; empty if no pod waits.
func (t Tenant) Reason() string {
	if t.Waiting == 0 {
		return ""
	}
	return t.Next.String() + ": " + reasons.Turn{Before: t.Before, Obstacle: t.Obstacle}.Brief()
}

// Turns returns the turns of all pods that wait for one; none if this process isn't the leader.
func (m *Manager) Turns() map[gpu.PodUID]reasons.Turn {
	turns, waiting, s := m.waitingTurns()
	if s == nil {
		return turns
	}
	m.setShares(s)
	for _, w := range waiting {
		t := s.tenants[w.tenant]
		turns[w.pod.UID] = reasons.Turn{Tenant: t.Name, Share: t.Share, Allocated: t.Allocated, Before: t.Before, Obstacle: w.obstacle}
	}
	return turns
}

// waitingTurn is a pod that waits for its turn. tenant is the position of its tenant.
type waitingTurn struct {
	pod      *Pod
	tenant   int
	obstacle reasons.Obstacle
}

// waitingTurns returns the pods that wait for their turn, the state of the tenants, and the turns of pods that wait for something else. They are nil if
// this process isn't the leader.
func (m *Manager) waitingTurns() (turns map[gpu.PodUID]reasons.Turn, waiting []waitingTurn, s *standings) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.leading {
		return nil, nil, nil
	}
	turns, waiting, s = map[gpu.PodUID]reasons.Turn{}, make([]waitingTurn, 0, len(m.pods)-len(m.allocated)), m.takeStandings()
	for i, items := range s.items {
		for _, it := range items {
			for _, p := range it.pods {
				waiting = append(waiting, waitingTurn{p.Pod, i, m.shownObstacle(it)})
			}
		}
	}
	for uid, p := range m.gated {
		if !p.gateRetry.IsZero() {
			turns[uid] = reasons.Turn{Tenant: m.namespaces[p.Namespace].Tenant, Obstacle: reasons.ObstacleGateStuck}
		}
	}
	for _, members := range m.members {
		for _, p := range members {
			if p.item == nil {
				turns[p.UID] = reasons.Turn{Tenant: m.namespaces[p.Namespace].Tenant, Obstacle: reasons.ObstacleIncomplete}
			}
		}
	}
	return turns, waiting, s
}

// DefaultPriorityCutoff is the default of TurnRules.PriorityCutoff: the priority of the class system-cluster-critical.
const DefaultPriorityCutoff = 2_000_000_000

// Snapshot returns the tenants, by name, as they are according to the API server alone. Of the options it uses Ledger, Groups,
// Nodes and TurnRules. Pods that the extender has granted count as waiting until they are bound.
func Snapshot(o Options, namespaces map[string]Namespace, pods []Pod) []Tenant {
	m := New(o)
	for name, ns := range namespaces {
		m.SetNamespace(name, ns)
	}
	for _, pod := range pods {
		m.SetPod(pod)
	}
	m.gatherGroups()
	for _, it := range m.items {
		if !m.Ledger.FitsEmpty(m.requests(it)) {
			it.kind.obstacle = reasons.ObstacleNeverFits
		}
	}
	return m.Tenants()
}

package dispatch

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// gateState is how far this process is with opening a gate. That the gate is gone is known from the watch alone (Pod.Gated).
//
//	closed  → opening  openGates requests the write
//	opening → opened   the write was made
//	opening → closed   the write failed
//	any     → closed   the term ends: another leader opens it
type gateState int

const (
	gateClosed gateState = iota
	gateOpening
	gateOpened
)

// MaxOpening limits the writes in flight that open gates.
const MaxOpening = 64

// refreshGate updates whether the pod's gate is to be opened.
func (m *Manager) refreshGate(p *pod) {
	delete(m.gated, p.UID)
	if p.Gated && p.gate != gateOpened && p.awaitsBind() && (p.charged() || !p.provisioning.IsZero() || !m.NeedsTurn(p.Pod.Pod)) {
		m.gated[p.UID] = p
	}
}

// openGates requests the writes that open the gates of granted pods, of those for an autoscaler, and of pods that need no turn.
func (m *Manager) openGates() {
	var due []*pod
	inFlight := 0
	for _, p := range m.gated {
		switch {
		case p.gate == gateOpening:
			inFlight++
		case !m.now.Before(p.gateRetry):
			due = append(due, p)
		}
	}
	slices.SortFunc(due, func(a, b *pod) int {
		// Granted pods hold memory, so they go first.
		return cmp.Or(gpu.TrueFirst(a.charged(), b.charged()), a.expires.Compare(b.expires), cmp.Compare(a.UID, b.UID))
	})
	for _, p := range due[:min(len(due), max(MaxOpening-inFlight, 0))] {
		p.gate = gateOpening
		m.effects.Open = append(m.effects.Open, p.Pod.Pod)
	}
}

// GateOpened records whether the gate of a pod was opened. If not, openGates tries it again while the pod is granted or needs no turn.
func (m *Manager) GateOpened(uid gpu.PodUID, opened bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch p := m.pods[uid]; {
	case p == nil:
	case opened:
		p.gate, p.gateRetry = gateOpened, time.Time{}
		delete(m.gated, uid)
	default:
		p.gate, p.gateRetry = gateClosed, m.now.Add(queue.Retry)
	}
}

const (
	// provisionAfter is how long an item waits before its gates are opened for an autoscaler: mostly memory becomes free sooner.
	provisionAfter = 2 * time.Minute
	// provisionLife is how long an autoscaler has until the tenant's next item follows: longer than cluster-autoscaler waits for a node
	// (max-node-provision-time).
	provisionLife = 20 * time.Minute
)

// provision opens the gates of items that don't fit, so that an autoscaler sees them: kube-scheduler reports pods without a gate as
// unschedulable. They still wait for their turn, and have neither a place nor a charge.
func (m *Manager) provision() {
	if m.Provisioning == 0 {
		return
	}
	for _, tenant := range m.queue.Tenants() {
		var opened []*item
		free := m.Provisioning
		for _, next := range tenant.Waiting {
			it := next.Value.(*item)
			if m.now.Sub(it.provisioning) < provisionLife {
				free--
			} else if len(opened) < m.Provisioning && m.needsNode(it) {
				opened = append(opened, it)
			}
		}
		for _, it := range opened[:max(0, min(free, len(opened)))] {
			it.provisioning = m.now
			for _, p := range it.pods {
				p.provisioning = m.now
				m.refreshGate(p)
			}
		}
	}
}

// needsNode reports whether no present node has room for the item, not even an empty one, or none has had any for some time, and an autoscaler
// can't see all of its pods.
func (m *Manager) needsNode(it *item) bool {
	obstacle := it.obstacle()
	late := obstacle == reasons.ObstacleNoRoom && m.now.Sub(it.Entered) >= provisionAfter && !m.hasHold(it)
	if obstacle != reasons.ObstacleNeverFits && !late || it.kind.isDue(m.now) {
		return false
	}
	return slices.ContainsFunc(it.pods, func(p *pod) bool { return p.provisioning.IsZero() && p.Gated })
}

package dispatch

import (
	"cmp"
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
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
	p := m.pods[uid]
	if p == nil {
		return
	}
	if opened {
		p.gate, p.gateRetry = gateOpened, time.Time{}
		delete(m.gated, uid)
	} else {
		p.gate, p.gateRetry = gateClosed, m.now.Add(queue.Retry)
	}
}

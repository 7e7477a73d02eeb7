package dispatch

import (
	"time"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/queue"
)

// grant is an item that was granted, until its pods are bound or have lost their charges. Its outcome is reported to Failures.
type grant struct {
	profile queue.Profile
	at      time.Time
	// charged counts the item's pods that have a charge. failed is true once one was not bound in time, bound once one was bound.
	charged       int
	failed, bound bool
}

// charged reports whether the pod was granted and isn't bound yet.
func (p *pod) charged() bool { return !p.expires.IsZero() }

// grantItem makes the grant of an item that the caller has charged to its tenant. The places are in the order of its pods.
func (m *Manager) grantItem(it *item, places []ledger.ChosenNode) {
	m.removeItem(it)
	g := &grant{profile: it.profile, at: m.now, charged: len(it.pods)}
	m.Failures.Placed(g.profile)
	for i, p := range it.pods {
		p.grant, p.expires = g, m.now.Add(m.Patience)
		if !places[i].Existing {
			m.Ledger.SetSource(ledger.Granted, p.UID)
		}
		m.leaveGroup(p)
		p.counted, p.countedFor = p.Request, it.Tenant
		m.charged[p.UID] = p
		m.updateAllocated(p)
		m.updateAdmitted(p)
		m.refreshGate(p)
		m.effects.Requeue = m.effects.Requeue || m.gated[p.UID] == nil
		m.Observer.PodGranted(max(m.now.Sub(p.Created), 0)) // The API server's clock can be ahead.
	}
}

// expire ends the charges of pods that were not bound in time.
func (m *Manager) expire() {
	for _, p := range m.charged {
		if m.now.Before(p.expires) {
			continue
		}
		unused := m.GiveUpPlace(p.UID)
		if _, _, allocated := m.Ledger.Lookup(p.UID); allocated { // A bind is in flight, or the plan of a group has the place.
			p.expires = m.now.Add(queue.Retry)
			continue
		}
		m.endCharge(p, unused || p.Group == (gang.Key{})) // If the plan of a group had the place, package gang reports failures.
		m.Observer.ChargeExpired()
		m.refresh(p)
	}
}

// endCharge ends the pod's charge and releases its place, unless a bind has it. failed is true if the pod should have been bound. It does nothing
// for a pod without a charge.
func (m *Manager) endCharge(p *pod, failed bool) {
	if !p.charged() {
		return
	}
	p.expires = time.Time{}
	if failed {
		p.failedAt = m.now
	}
	m.endGrant(p.grant, p.Node != "", failed)
	delete(m.charged, p.UID)
	m.updateAdmitted(p)
	if p.Node == "" { // Otherwise the bound allocation has replaced it.
		m.GiveUpPlace(p.UID)
	}
}

// endGrant records what became of one of the pods that were granted together.
func (m *Manager) endGrant(g *grant, bound, failed bool) {
	g.charged--
	g.bound = g.bound || bound
	switch {
	case failed && !g.failed:
		g.failed = true
		m.Failures.Failed(g.profile, g.at, m.now)
	case g.charged > 0, g.failed:
	case g.bound:
		m.Failures.Arrived(g.profile)
	default:
		m.Failures.Ended(g.profile)
	}
}

// GiveUpPlace releases the reserved place of a pod whose node is not a candidate node. The pod keeps its charge. GiveUpPlace reports whether
// there was a place.
func (m *Manager) GiveUpPlace(uid gpu.PodUID) bool {
	if !m.Ledger.ResetSource(ledger.Granted, uid) {
		return false
	}
	m.Release(uid)
	return true
}

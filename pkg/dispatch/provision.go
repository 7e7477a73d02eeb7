package dispatch

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/reasons"
)

const (
	// provisionAfter is how long a unit waits before its gates are opened for an autoscaler: mostly memory becomes free sooner.
	provisionAfter = 2 * time.Minute
	// provisionLife is how long an autoscaler has until the tenant's next unit follows: longer than cluster-autoscaler waits for a node
	// (max-node-provision-time).
	provisionLife = 20 * time.Minute
)

// provision opens the gates of units that don't fit, so that an autoscaler sees them: kube-scheduler reports pods without a gate as
// unschedulable. They still wait for their turn, and have neither a place nor a charge.
func (m *Manager) provision() {
	if m.Provisioning == 0 {
		return
	}
	for _, tenant := range m.queue.Tenants() {
		var next []*unit
		free := m.Provisioning
		for _, item := range tenant.Waiting {
			u := item.Value.(*unit)
			if m.now.Sub(u.provisioning) < provisionLife {
				free--
			} else if len(next) < m.Provisioning && m.needsNode(u) {
				next = append(next, u)
			}
		}
		for _, u := range next[:max(0, min(free, len(next)))] {
			u.provisioning = m.now
			for _, p := range u.pods {
				p.provisioning = m.now
				m.refreshGate(p)
			}
		}
	}
}

// needsNode reports whether no present node has room for the unit, not even an empty one, or none has had any for some time, and an autoscaler
// can't see all of its pods.
func (m *Manager) needsNode(u *unit) bool {
	obstacle := u.obstacle()
	late := obstacle == reasons.ObstacleNoRoom && m.now.Sub(u.item.Entered) >= provisionAfter && !m.hasHold(u)
	if obstacle != reasons.ObstacleNeverFits && !late || u.kind.isDue(m.now) {
		return false
	}
	return slices.ContainsFunc(u.pods, func(p *pod) bool { return p.provisioning.IsZero() && p.Gated })
}

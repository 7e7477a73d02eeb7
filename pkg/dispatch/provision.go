package dispatch

import (
	"slices"
	"time"

	"github.com/gpushare/gpushare/pkg/reasons"
)

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

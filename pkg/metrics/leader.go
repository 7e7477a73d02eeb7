package metrics

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Leader implements leader.Observer.
type Leader struct {
	leads   prometheus.Gauge
	changes prometheus.Counter
	started atomic.Bool
}

// NewLeader registers the collectors of a replica that takes part in leader election.
func NewLeader(registry prometheus.Registerer) *Leader {
	l := &Leader{
		leads:   newGaugeVec("leading", "1 while this replica is the leader, 0 while it is a standby.").WithLabelValues(),
		changes: newCounter("leadership_changes_total", "Number of times that this replica became leader or stopped being leader."),
	}
	registry.MustRegister(l.leads, l.changes)
	return l
}

// LeadershipChanged implements leader.Observer. The first call, at the start, is not counted as a change.
func (l *Leader) LeadershipChanged(leads bool) {
	l.leads.Set(toFloat(leads))
	if l.started.Swap(true) {
		l.changes.Inc()
	}
}

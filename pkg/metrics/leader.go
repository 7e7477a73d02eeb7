package metrics

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// Leader implements leader.Observer.
type Leader struct {
	leads   prometheus.Gauge
	changes prometheus.Counter
	told    atomic.Bool
}

// NewLeader registers the collectors of a replica that takes part in an election.
func NewLeader(registry prometheus.Registerer) *Leader {
	l := &Leader{
		leads: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: namespace, Name: "leading", Help: "1 while this replica leads, 0 while it stands by.",
		}),
		changes: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "leadership_changes_total", Help: "Times that this replica began or ceased to lead.",
		}),
	}
	registry.MustRegister(l.leads, l.changes)
	return l
}

// LeadershipChanged implements leader.Observer. Its first call, at the start, is no change.
func (l *Leader) LeadershipChanged(leads bool) {
	l.leads.Set(truth(leads))
	if l.told.Swap(true) {
		l.changes.Inc()
	}
}

package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/reasons"
)

// Gangs implements gang.Observer.
type Gangs struct {
	registry prometheus.Registerer
	held     prometheus.Histogram
	bound    prometheus.Counter
	failed   *prometheus.CounterVec
	evicted  prometheus.Counter
}

// NewGangs registers the collectors of gangs.
func NewGangs(registry prometheus.Registerer) *Gangs {
	g := &Gangs{
		registry: registry,
		held: newHistogram("gang_hold_seconds",
			"Time for which the bind of a gang's first member was held until all members had arrived, in seconds; only gangs that became complete.", 0.01, 2),
		bound: newCounter("gangs_bound_total", "Number of gangs whose members were all bound together."),
		failed: newCounterVec("gang_failures_total",
			"Number of failed attempts to bind a gang, by reason; timed_out keeps the gang's plan if more members arrived than before, all other "+
				"reasons release it.", "reason"),
		evicted: newCounter("gang_evictions_total", "Number of pods evicted because other members of their gang could not be bound."),
	}
	for _, label := range reasons.GroupFailures {
		g.failed.WithLabelValues(label)
	}
	registry.MustRegister(g.held, g.bound, g.failed, g.evicted)
	return g
}

// Count registers the collector of the number of runs by phase. It calls phases at each scrape.
func (g *Gangs) Count(phases func() map[string]int) {
	gangs := gaugeDesc("gangs", "Number of gangs (groups of pods) by phase; a gang counts once for each of its runs.", "phase")
	g.registry.MustRegister(&gauges{[]*prometheus.Desc{gangs}, func(set setGauge) {
		for phase, n := range phases() {
			set(gangs, float64(n), phase)
		}
	}})
}

// BarrierOpened implements gang.Observer.
func (g *Gangs) BarrierOpened(wait time.Duration) { g.held.Observe(wait.Seconds()) }

// GangBound implements gang.Observer.
func (g *Gangs) GangBound() { g.bound.Inc() }

// GangFailed implements gang.Observer.
func (g *Gangs) GangFailed(reason reasons.Group) {
	g.failed.WithLabelValues(reasons.GroupFailures[reason]).Inc()
}

// GangEvicted implements gang.Observer.
func (g *Gangs) GangEvicted() { g.evicted.Inc() }

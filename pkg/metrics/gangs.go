package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Gangs implements gang.Observer.
type Gangs struct {
	registry prometheus.Registerer
	held     prometheus.Histogram
	bound    prometheus.Counter
	failed   *prometheus.CounterVec
	evicted  prometheus.Counter
	starving prometheus.Counter
}

// NewGangs registers the collectors of gangs.
func NewGangs(registry prometheus.Registerer) *Gangs {
	g := &Gangs{
		registry: registry,
		held: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Name: "gang_hold_seconds",
			Help:    "Time for which the bind of a gang's first member was held until all members had arrived, in seconds; only gangs that became complete.",
			Buckets: prometheus.ExponentialBuckets(0.01, 2, 13),
		}),
		bound: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "gangs_bound_total", Help: "Number of gangs whose members were all bound together.",
		}),
		failed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "gang_failures_total",
			Help: "Number of failed attempts to bind a gang, by reason; timed_out keeps the gang's plan if more members arrived than before, all other reasons release it.",
		}, []string{"reason"}),
		evicted: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "gang_evictions_total", Help: "Number of pods evicted because other members of their gang could not be bound.",
		}),
	}
	g.starving = prometheus.NewCounter(prometheus.CounterOpts{
		Namespace: namespace, Name: "starvation_reservations_total", Help: "Number of starvation reservations that were made for gangs.",
	})
	registry.MustRegister(g.held, g.bound, g.failed, g.evicted, g.starving)
	return g
}

// Count registers the collector of the number of runs by phase. It calls phases at each scrape.
func (g *Gangs) Count(phases func() map[string]int) {
	g.registry.MustRegister(gangPhases{phases, prometheus.NewDesc(prometheus.BuildFQName(namespace, "", "gangs"),
		"Number of gangs (groups of pods) by phase; a gang counts once for each of its runs.", []string{"phase"}, nil)})
}

// GangHeld implements gang.Observer.
func (g *Gangs) GangHeld(wait time.Duration) { g.held.Observe(wait.Seconds()) }

// GangBound implements gang.Observer.
func (g *Gangs) GangBound() { g.bound.Inc() }

// GangFailed implements gang.Observer.
func (g *Gangs) GangFailed(reason string) { g.failed.WithLabelValues(reason).Inc() }

// GangStarving implements gang.Observer.
func (g *Gangs) GangStarving() { g.starving.Inc() }

// GangEvicted implements gang.Observer.
func (g *Gangs) GangEvicted() { g.evicted.Inc() }

type gangPhases struct {
	phases func() map[string]int
	desc   *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c gangPhases) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c gangPhases) Collect(ch chan<- prometheus.Metric) {
	for phase, n := range c.phases() {
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(n), phase)
	}
}

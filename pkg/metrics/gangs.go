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
	claimed  prometheus.Counter
}

// NewGangs registers the collectors of groups of pods.
func NewGangs(registry prometheus.Registerer) *Gangs {
	g := &Gangs{
		registry: registry,
		held: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Name: "gang_hold_seconds",
			Help:    "How long the first member of a group was held until all had come, for groups that came together.",
			Buckets: prometheus.ExponentialBuckets(0.01, 2, 13),
		}),
		bound: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "gangs_bound_total", Help: "Groups of which all members were bound together.",
		}),
		failed: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "gang_failures_total",
			Help: "Rounds of groups that came to nothing, by reason; timed_out keeps the group's places, the others don't.",
		}, []string{"reason"}),
		evicted: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "gang_evictions_total", Help: "Pods evicted since their group was bound in part and didn't become whole.",
		}),
	}
	g.claimed = prometheus.NewCounter(prometheus.CounterOpts{
		Namespace: namespace, Name: "gang_claims_total", Help: "Times that memory that comes free was kept for a group that had waited long.",
	})
	registry.MustRegister(g.held, g.bound, g.failed, g.evicted, g.claimed)
	return g
}

// Count registers what counts the groups by state, at each scrape.
func (g *Gangs) Count(states func() map[string]int) {
	g.registry.MustRegister(gangStates{states, prometheus.NewDesc(
		prometheus.BuildFQName(namespace, "", "gangs"), "Groups of pods, by state.", []string{"state"}, nil)})
}

// GangHeld implements gang.Observer.
func (g *Gangs) GangHeld(wait time.Duration) { g.held.Observe(wait.Seconds()) }

// GangBound implements gang.Observer.
func (g *Gangs) GangBound() { g.bound.Inc() }

// GangFailed implements gang.Observer.
func (g *Gangs) GangFailed(reason string) { g.failed.WithLabelValues(reason).Inc() }

// GangClaimed implements gang.Observer.
func (g *Gangs) GangClaimed() { g.claimed.Inc() }

// GangEvicted implements gang.Observer.
func (g *Gangs) GangEvicted() { g.evicted.Inc() }

type gangStates struct {
	states func() map[string]int
	desc   *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c gangStates) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c gangStates) Collect(ch chan<- prometheus.Metric) {
	for state, n := range c.states() {
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(n), state)
	}
}

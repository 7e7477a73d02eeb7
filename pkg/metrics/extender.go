// Package metrics holds the extender's Prometheus collectors.
//
// They hang on a registry that is handed in, and are fed through the Observer interfaces that the packages declare, so
// that none of those knows Prometheus. What the ledger holds is read at each scrape rather than kept in step.
package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/placement"
)

const namespace = "gpushare_extender"

// Extender implements the Observers of packages extender and cluster.
type Extender struct {
	requests *prometheus.HistogramVec
	filtered *prometheus.CounterVec
	binds    *prometheus.CounterVec
	settled  *prometheus.CounterVec
	writes   *prometheus.CounterVec
	evicted  *prometheus.CounterVec
	rebuilt  prometheus.Gauge
	woken    prometheus.Counter
	expiry   *prometheus.GaugeVec
}

// NewExtender registers the collectors.
func NewExtender(registry prometheus.Registerer) *Extender {
	e := &Extender{
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: namespace, Name: "request_duration_seconds",
			Help:    "How long kube-scheduler's calls took, by verb and outcome (ok, error, panic).",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 17),
		}, []string{"verb", "outcome"}),
		filtered: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "filtered_nodes_total",
			Help: "Nodes that filter looked at, by what it said of them.",
		}, []string{"reason"}),
		binds: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "binds_total",
			Help: "Binds by result; no_room is a conflict: the card went to another pod between filter and bind.",
		}, []string{"result"}),
		settled: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "settled_binds_total",
			Help: "Binds whose answer was lost, by what had become of them.",
		}, []string{"outcome"}),
		writes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "api_writes_total",
			Help: "Writes to the API server, Events left out, by kind of object.",
		}, []string{"kind"}),
		evicted: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: namespace, Name: "eviction_rounds_total",
			Help: "Attempts to free a card for a pod that only fragmentation kept waiting, by result.",
		}, []string{"result"}),
		rebuilt: prometheus.NewGauge(prometheus.GaugeOpts{
			Namespace: namespace, Name: "ledger_rebuild_seconds",
			Help: "How long it took from the start until the ledger stood; 0 until it does.",
		}),
		woken: prometheus.NewCounter(prometheus.CounterOpts{
			Namespace: namespace, Name: "queue_wakes_total",
			Help: "Times that kube-scheduler was made to look at refused pods again.",
		}),
		expiry: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Namespace: namespace, Name: "certificate_expiry_timestamp_seconds",
			Help: "When a certificate expires, in Unix seconds: the extender's own (server), and the one that kube-scheduler has shown last (client), each with its chain.",
		}, []string{"certificate"}),
	}
	// What has never happened counts as zero, so that the first time is an increase.
	for _, verb := range []string{"filter", "prioritize", "bind", "preempt"} {
		for _, outcome := range []string{"ok", "error", "panic"} {
			e.requests.WithLabelValues(verb, outcome)
		}
	}
	for _, reason := range placement.Reasons() {
		e.filtered.WithLabelValues(reason.Label())
	}
	registry.MustRegister(e.requests, e.filtered, e.binds, e.settled, e.writes, e.evicted, e.rebuilt, e.woken, e.expiry)
	return e
}

// Answered implements extender.Observer.
func (e *Extender) Answered(verb, outcome string, took time.Duration) {
	e.requests.WithLabelValues(verb, outcome).Observe(took.Seconds())
}

// Filtered implements extender.Observer.
func (e *Extender) Filtered(reason placement.Reason, nodes int) {
	e.filtered.WithLabelValues(reason.Label()).Add(float64(nodes))
}

// CertificateExpires implements extender.Observer.
func (e *Extender) CertificateExpires(certificate string, at time.Time) {
	e.expiry.WithLabelValues(certificate).Set(float64(at.Unix()))
}

// BindFinished implements cluster.Observer.
func (e *Extender) BindFinished(result string) { e.binds.WithLabelValues(result).Inc() }

// Settled implements cluster.Observer.
func (e *Extender) Settled(outcome string) { e.settled.WithLabelValues(outcome).Inc() }

// Evicted implements cluster.Observer.
func (e *Extender) Evicted(result string) { e.evicted.WithLabelValues(result).Inc() }

// Rebuilt implements cluster.Observer.
func (e *Extender) Rebuilt(took time.Duration) { e.rebuilt.Set(took.Seconds()) }

// Woken implements cluster.Observer.
func (e *Extender) Woken() { e.woken.Inc() }

// APIWrite implements cluster.Observer.
func (e *Extender) APIWrite(kind string) { e.writes.WithLabelValues(kind).Inc() }

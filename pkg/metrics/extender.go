// Package metrics holds the extender's Prometheus collectors.
//
// The caller provides the registry. The collectors implement the Observer interfaces of other packages, which therefore
// don't depend on Prometheus. The ledger's state is read at each scrape.
package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpushare/gpushare/pkg/reasons"
)

const namespace = "gpushare_extender"

// newCounter returns a counter without labels.
func newCounter(name, help string) prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help})
}

func newCounterVec(name, help string, labels ...string) *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

func newGaugeVec(name, help string, labels ...string) *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, labels)
}

// newHistogram returns a histogram of seconds with 13 buckets. The first is start, and each other one is factor times the one before.
func newHistogram(name, help string, start, factor float64) prometheus.Histogram {
	return prometheus.NewHistogram(prometheus.HistogramOpts{
		Namespace: namespace, Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(start, factor, 13),
	})
}

// Extender implements the Observers of packages extender and scheduling.
type Extender struct {
	requests       *prometheus.HistogramVec
	filtered       *prometheus.CounterVec
	binds          *prometheus.CounterVec
	resolved       *prometheus.CounterVec
	writes         *prometheus.CounterVec
	evicted        *prometheus.CounterVec
	overuse        *prometheus.CounterVec
	nominated      *prometheus.CounterVec
	synced         prometheus.Gauge
	requeues       prometheus.Counter
	bypassed       prometheus.Counter
	recordFailures prometheus.Counter
	reserved       prometheus.Counter
	expiry         *prometheus.GaugeVec
}

// NewExtender registers the collectors.
func NewExtender(registry prometheus.Registerer) *Extender {
	e := &Extender{
		requests: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: namespace, Name: "request_duration_seconds",
			Help:    "Duration of kube-scheduler's calls in seconds, by verb and outcome (ok, error, panic).",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 17),
		}, []string{"verb", "outcome"}),
		filtered: newCounterVec("filtered_nodes_total", "Number of candidate nodes that filter has checked, by result: fits, or the reason for "+
			"the rejection.", "reason"),
		binds: newCounterVec("binds_total", "Number of bind calls, by result; no_room is a conflict: another pod got the card between filter "+
			"and bind.", "result"),
		resolved: newCounterVec("resolved_binds_total", "Number of resolved binds whose answer was lost, by the state of the pod in the API "+
			"server.", "outcome"),
		writes: newCounterVec("api_writes_total", "Number of writes to the API server without Events, by kind of object.", "kind"),
		evicted: newCounterVec("eviction_rounds_total", "Number of attempts to free a card for a pod that only fragmentation keeps pending, by "+
			"result.", "result"),
		overuse: newCounterVec("overuse_evictions_total", "Number of attempts to evict a pod that uses more GPU memory than it requests, by "+
			"result.", "result"),
		nominated: newCounterVec("nominations_total", "Number of writes that nominate a pod to a node, by result.", "result"),
		synced:    newGaugeVec("cache_sync_seconds", "Time from the start until the caches were synced, in seconds; 0 until then.").WithLabelValues(),
		requeues:  newCounter("requeues_total", "Number of times that the extender made kube-scheduler retry rejected pods."),
		recordFailures: newCounter("eviction_record_failures_total", "Number of failed attempts to read or write the ConfigMap that records evictions "+
			"for other pods."),
		reserved: newCounter("awaited_reservations_total", "Number of times that cards in use were reserved for an item that waits for memory."),
		bypassed: newCounter("binds_without_extender_total", "Number of pods that ask for GPU memory and were bound by a scheduler that did not "+
			"call the extender."),
		expiry: newGaugeVec("certificate_expiry_timestamp_seconds", "Time at which the first certificate of a chain expires, in Unix seconds: "+
			"the extender's own chain (server), or the last one that kube-scheduler presented (client).", "certificate"),
	}
	// Series start at zero, so that the first event is an increase.
	for _, verb := range []string{"filter", "prioritize", "bind", "preempt"} {
		for _, outcome := range []string{"ok", "error", "panic"} {
			e.requests.WithLabelValues(verb, outcome)
		}
	}
	for _, reason := range append(reasons.OfNodes(), reasons.Fits) {
		e.filtered.WithLabelValues(reason.String())
	}
	startAtZero(e.binds, reasons.BindResults()...)
	startAtZero(e.resolved, reasons.ResolveResults()...)
	startAtZero(e.writes, "binding", "node", "eviction", "nomination")
	startAtZero(e.evicted, reasons.EvictionResults()...)
	startAtZero(e.overuse, reasons.EvictionResults()...)
	startAtZero(e.nominated, reasons.NominationResults()...)
	registry.MustRegister(e.requests, e.filtered, e.binds, e.resolved, e.writes, e.evicted, e.overuse, e.nominated, e.synced, e.requeues, e.bypassed,
		e.recordFailures, e.reserved, e.expiry)
	return e
}

// startAtZero creates the series of the values of a counter's only label.
func startAtZero[Label ~string](counter *prometheus.CounterVec, values ...Label) {
	for _, value := range values {
		counter.WithLabelValues(string(value))
	}
}

// Answered implements extender.Observer.
func (e *Extender) Answered(verb, outcome string, took time.Duration) {
	e.requests.WithLabelValues(verb, outcome).Observe(took.Seconds())
}

// Filtered implements scheduling.Observer.
func (e *Extender) Filtered(reason reasons.Reason, nodes int) {
	e.filtered.WithLabelValues(reason.String()).Add(float64(nodes))
}

// CertificateExpires implements extender.Observer.
func (e *Extender) CertificateExpires(certificate string, at time.Time) {
	e.expiry.WithLabelValues(certificate).Set(float64(at.Unix()))
}

// BindFinished implements scheduling.Observer.
func (e *Extender) BindFinished(result reasons.Result) { e.binds.WithLabelValues(string(result)).Inc() }

// BindResolved implements scheduling.Observer.
func (e *Extender) BindResolved(outcome reasons.Result) {
	e.resolved.WithLabelValues(string(outcome)).Inc()
}

// Evicted implements scheduling.Observer.
func (e *Extender) Evicted(result reasons.Result) { e.evicted.WithLabelValues(string(result)).Inc() }

// EvictionRecordFailed implements scheduling.Observer.
func (e *Extender) EvictionRecordFailed() { e.recordFailures.Inc() }

// OveruserEvicted implements scheduling.Observer.
func (e *Extender) OveruserEvicted(result reasons.Result) {
	e.overuse.WithLabelValues(string(result)).Inc()
}

// CacheSynced implements scheduling.Observer.
func (e *Extender) CacheSynced(took time.Duration) { e.synced.Set(took.Seconds()) }

// Requeued implements scheduling.Observer.
func (e *Extender) Requeued() { e.requeues.Inc() }

// BoundWithoutExtender implements scheduling.Observer.
func (e *Extender) BoundWithoutExtender() { e.bypassed.Inc() }

// Reserved implements scheduling.Observer.
func (e *Extender) Reserved() { e.reserved.Inc() }

// Nominated implements scheduling.Observer.
func (e *Extender) Nominated(result reasons.Result) {
	e.nominated.WithLabelValues(string(result)).Inc()
}

// APIWrite implements scheduling.Observer.
func (e *Extender) APIWrite(kind string) { e.writes.WithLabelValues(kind).Inc() }

package deviceplugin

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/gpushare/gpushare/pkg/allocation"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/isolation"
	"github.com/gpushare/gpushare/pkg/protocol"
)

// metrics are the plugin's metrics. Every label has few values, and each value is present from the start.
type metrics struct {
	registry         *prometheus.Registry
	allocations      *prometheus.CounterVec
	duration         prometheus.Histogram
	matches          *prometheus.CounterVec
	otherDevices     prometheus.Counter
	repairs          prometheus.Counter
	annotationErrors prometheus.Counter
	registrations    prometheus.Counter
	cards            *prometheus.GaugeVec
	messageBytes     prometheus.Gauge
	config           *prometheus.GaugeVec
	configOutdated   prometheus.Gauge
	limits           *prometheus.GaugeVec
	isolation        *prometheus.GaugeVec
	overuse          prometheus.Gauge
}

// newMetrics returns the metrics, registered in a registry of their own. registered reports whether the kubelet is connected.
func newMetrics(registered func() bool) *metrics {
	const namespace, subsystem = "gpushare", "device_plugin"
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help}
	}
	gauge := func(name, help string) prometheus.GaugeOpts {
		return prometheus.GaugeOpts{Namespace: namespace, Subsystem: subsystem, Name: name, Help: help}
	}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		allocations: prometheus.NewCounterVec(counter("allocations_total",
			"Containers for which the kubelet called Allocate, by how their card was selected or why they got none."), []string{"result"}),
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: namespace, Subsystem: subsystem, Name: "allocation_duration_seconds",
			Help:    "Time that an Allocate call of the kubelet took.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .5, 1, 3, 10},
		}),
		matches: prometheus.NewCounterVec(counter("matches_total",
			"Allocations by how their pod was found: kubelet (by its answers), order (the most likely pod), none (not found)."), []string{"by"}),
		otherDevices: prometheus.NewCounter(counter("other_card_devices_total",
			"Allocations that the kubelet recorded with devices of another card than the one given. Containers aren't affected.")),
		repairs: prometheus.NewCounter(counter("annotation_repairs_total",
			"Pods whose annotations named another card than their containers got, and were rewritten.")),
		annotationErrors: prometheus.NewCounter(counter("annotation_errors_total",
			"Failed attempts to write a pod's annotations. They are repeated.")),
		registrations: prometheus.NewCounter(counter("registrations_total",
			"Successful registrations with the kubelet.")),
		cards: prometheus.NewGaugeVec(gauge("cards",
			"Cards of the node by health. An excluded card takes no new pods because of the configuration."), []string{"health"}),
		messageBytes: prometheus.NewGauge(gauge("list_and_watch_bytes",
			"Size of the largest message that these cards and this unit can come to. The kubelet takes 4194304.")),
		config: prometheus.NewGaugeVec(gauge("config_info",
			"Configuration in force, by the name of its file and a hash of the content; both are empty without a file."), []string{"config", "hash"}),
		configOutdated: prometheus.NewGauge(gauge("config_outdated",
			"1 while the configuration that the node selects is not, or not completely, in force.")),
	}
	m.setConfig("", "")
	m.limits = prometheus.NewGaugeVec(gauge("limits",
		"Limits that running containers were given, one for each of their cards, by whether the driver has it."), []string{"state"})
	m.isolation = prometheus.NewGaugeVec(gauge("isolation_mode",
		"1 for the isolation mode in which new containers start."), []string{"mode"})
	m.overuse = prometheus.NewGauge(gauge("overusing_pods",
		"Pods that use more GPU memory than they request or may use, beyond the tolerance and for longer than the grace period, "+
			"or that borrow memory of a card that is low on it."))
	for _, state := range []string{"in_force", "not_in_force"} {
		m.limits.WithLabelValues(state)
	}
	m.setIsolation(isolation.None)
	for _, r := range allocation.Results() {
		m.allocations.WithLabelValues(string(r))
	}
	for _, by := range allocation.Matches() {
		m.matches.WithLabelValues(string(by))
	}
	m.registry.MustRegister(m.allocations, m.duration, m.matches, m.otherDevices, m.repairs, m.annotationErrors,
		prometheus.NewGaugeFunc(gauge("registered", "1 while the kubelet is connected and listens for devices."), func() float64 { return oneIf(registered()) }),
		m.registrations, m.cards, m.messageBytes, m.config, m.configOutdated, m.limits, m.isolation, m.overuse,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *metrics) setIsolation(inForce isolation.Mode) {
	for _, mode := range protocol.IsolationModes() {
		m.isolation.WithLabelValues(mode).Set(oneIf(mode == string(inForce)))
	}
}

func (m *metrics) setCards(cards []gpu.Card) {
	count := map[string]float64{"healthy": 0, "unhealthy": 0, "excluded": 0}
	for _, c := range cards {
		switch {
		case c.Healthy():
			count["healthy"]++
		case isExcluded(c):
			count["excluded"]++
		default:
			count["unhealthy"]++
		}
	}
	for health, n := range count {
		m.cards.WithLabelValues(health).Set(n)
	}
	m.messageBytes.Set(float64(messageSize(cards)))
}

// setConfig sets the configuration in force.
func (m *metrics) setConfig(name, hash string) {
	m.config.Reset()
	m.config.WithLabelValues(name, hash).Set(1)
}

// oneIf returns 1 for true and 0 for false.
func oneIf(condition bool) float64 {
	if condition {
		return 1
	}
	return 0
}

// observe records the duration of an Allocate call.
func (m *metrics) observe(start time.Time) { m.duration.Observe(time.Since(start).Seconds()) }

// count counts a decision for these devices. Allocations with devices of other cards, which the kubelet's checkpoint then names,
// are counted too. There can be good reasons, such as devices that an init container with another request had.
func (m *metrics) count(d allocation.Decision, ids []string) {
	m.matches.WithLabelValues(string(d.Match)).Inc()
	m.allocations.WithLabelValues(string(d.Result)).Inc()
	if d.Rejection == nil && !evenlyOf(d.Indexes(), ids) {
		m.otherDevices.Inc()
	}
}
